"""The nets of the public DLRM script's class: imported, with copies, certified."""

import cases
import pytest
from test_inject import chained, check, device

from graphir import caffe2, passes


def steps(case):
    return [stem for stem in ("forward", "train") if case.has(stem)]


@pytest.mark.parametrize("case", cases.params("dlrm"))
def test_programs(case):
    for stem in steps(case):
        program = case.program(stem)
        check(program, passes.inject_copies(program))


@pytest.mark.parametrize("case", cases.params("dlrm"))
def test_nets_with_what_is_fed_where_it_is_fed(case):
    host = {"device_type": 0, "device_id": 0}
    fed = {blob["blob"]: device(blob["device"] or host) for blob in case.record["expected"]["fed_blobs"]}
    for stem in steps(case):
        nets = [caffe2.load_net(case.net(name)) for name in ("param_init_net", stem) if case.has(name)]
        placed = []
        maps = {"blob_to_device": fed, "blob_remap": {}}
        for net in nets:
            done = passes.inject_copies(net, **maps)
            maps = {"blob_to_device": done.blob_to_device, "blob_remap": done.blob_remap}
            placed.append(done.net)
        program = chained(nets)
        check(program, chained(placed, program.step.external_outputs))
