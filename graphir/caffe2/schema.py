"""The messages of Caffe2's ``caffe2.proto`` that a ``NetDef`` is made of, as they were in torch 1.8.1.

The schema is built here as a descriptor and handed to the ``protobuf`` package, which reads, writes and prints the
messages. It lives in a pool of its own, so that a Caffe2 in the same process keeps its own classes.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from google.protobuf.descriptor_pb2 import DescriptorProto, EnumDescriptorProto, FileDescriptorProto

__all__ = ["Message", "Messages", "messages"]

Message: TypeAlias = Any
"""A message of this schema: its fields are known at run time only."""

_ENUMS: Final = {
    "DeviceTypeProto": """
        PROTO_CPU=0 PROTO_CUDA=1 PROTO_MKLDNN=2 PROTO_OPENGL=3 PROTO_OPENCL=4 PROTO_IDEEP=5 PROTO_HIP=6 PROTO_FPGA=7
        PROTO_MSNPU=8 PROTO_XLA=9 PROTO_COMPILE_TIME_MAX_DEVICE_TYPES=10
    """,
    "ExternalDataProto.SourceType": "INLINE_CONTAINER=0 SIMPLE_FILE=1",
    "TensorProto.DataType": """
        UNDEFINED=0 FLOAT=1 INT32=2 BYTE=3 STRING=4 BOOL=5 UINT8=6 INT8=7 UINT16=8 INT16=9 INT64=10 FLOAT16=12
        DOUBLE=13 ZERO_COLLISION_HASH=14
    """,
    "TensorProto.StorageType": "TYPED=1 RAW=2 EXTERNAL=3 NO_CONTENT=4",
}
"""``NAME=NUMBER`` of each value, by the enum's name; ``Message.Enum`` stands inside the message."""

_MESSAGES: Final = {
    "ExternalDataProto": """
        1  optional ExternalDataProto.SourceType source_type = INLINE_CONTAINER
        2  optional string record_id
        5  optional uint64 record_size
        3  optional int64 offset = 0
        4  repeated int64 strides
    """,
    "TensorProto": """
        1  repeated int64 dims
        2  optional TensorProto.DataType data_type = FLOAT
        12 optional TensorProto.StorageType storage_type = TYPED
        3  packed float float_data
        4  packed int32 int32_data
        5  optional bytes byte_data
        6  repeated bytes string_data
        9  packed double double_data
        10 packed int64 int64_data
        13 optional bytes raw_data
        14 optional ExternalDataProto external_data
        7  optional string name
        8  optional DeviceOption device_detail
        11 optional TensorProto.Segment segment
    """,
    "TensorProto.Segment": """
        1  required int64 begin
        2  required int64 end
    """,
    "QTensorProto": """
        1  repeated int64 dims
        2  required int32 precision
        3  required double scale
        4  required double bias
        5  required bool is_signed
        6  packed int32 data
        7  optional string name
        8  optional TensorProto.DataType data_type = INT32
        9  repeated double scales
        10 repeated double biases
        11 optional int32 axis
        12 optional bool is_multiparam = false
    """,
    "Argument": """
        1  optional string name
        2  optional float f
        3  optional int64 i
        4  optional bytes s
        10 optional TensorProto t
        8  optional NetDef n
        5  repeated float floats
        6  repeated int64 ints
        7  repeated bytes strings
        11 repeated TensorProto tensors
        9  repeated NetDef nets
        12 repeated QTensorProto qtensors
    """,
    "DeviceOption": """
        1  optional int32 device_type = 0
        2  optional int32 device_id
        3  optional uint32 random_seed
        4  optional string node_name
        5  optional int32 numa_node_id
        6  repeated string extra_info
    """,
    "OperatorDef": """
        1  repeated string input
        2  repeated string output
        3  optional string name
        4  optional string type
        5  repeated Argument arg
        6  optional DeviceOption device_option
        7  optional string engine
        8  repeated string control_input
        9  optional bool is_gradient_op = false
        10 optional string debug_info
        11 optional string domain
        12 optional int64 op_version
    """,
    "MapFieldEntry": """
        1  required string key
        2  required string val
    """,
    "BackendOptions": """
        1  required string backend_name
        2  repeated MapFieldEntry option
    """,
    "PartitionInfo": """
        1  required string name
        2  repeated int32 device_id
        3  optional string extra_info
        4  repeated BackendOptions backend_options
    """,
    "NetDef": """
        1  optional string name
        2  repeated OperatorDef op
        3  optional string type
        4  optional int32 num_workers
        5  optional DeviceOption device_option
        6  repeated Argument arg
        7  repeated string external_input
        8  repeated string external_output
        9  repeated PartitionInfo partition_info
    """,
}
"""The fields of each message, one a line: number, label, type, name and default. ``packed`` is a repeated field whose
items are written together."""


class Messages(NamedTuple):
    """The message classes that nets are read and written by."""

    NetDef: type[Message]
    OperatorDef: type[Message]
    DeviceOption: type[Message]


@lru_cache(maxsize=1)
def messages() -> Messages:
    """The message classes. The first call builds them, and imports ``protobuf``."""
    from google.protobuf.descriptor_pool import DescriptorPool
    from google.protobuf.message_factory import GetMessageClass

    pool = DescriptorPool()
    pool.AddSerializedFile(_file().SerializeToString())
    return Messages(*(GetMessageClass(pool.FindMessageTypeByName(f"caffe2.{name}")) for name in Messages._fields))


def _file() -> FileDescriptorProto:
    from google.protobuf.descriptor_pb2 import FileDescriptorProto

    file = FileDescriptorProto(name="caffe2/proto/caffe2.proto", package="caffe2", syntax="proto2")
    found: dict[str, DescriptorProto] = {}
    for name, fields in _MESSAGES.items():
        outer, _, inner = name.rpartition(".")
        message = found[outer].nested_type.add(name=inner) if outer else file.message_type.add(name=name)
        found[name] = message
        for line in fields.strip().splitlines():
            _add_field(message, *line.split())
    for name, values in _ENUMS.items():
        outer, _, inner = name.rpartition(".")
        _add_values(found[outer].enum_type.add(name=inner) if outer else file.enum_type.add(name=name), values)
    return file


def _add_field(message: DescriptorProto, number: str, label: str, type: str, name: str, *default: str) -> None:
    from google.protobuf.descriptor_pb2 import FieldDescriptorProto

    field = message.field.add(name=name, number=int(number))
    field.label = FieldDescriptorProto.Label.Value(f"LABEL_{'REPEATED' if label == 'packed' else label.upper()}")
    if label == "packed":
        field.options.packed = True
    if type in _MESSAGES or type in _ENUMS:
        field.type = FieldDescriptorProto.TYPE_ENUM if type in _ENUMS else FieldDescriptorProto.TYPE_MESSAGE
        field.type_name = f".caffe2.{type}"
    else:
        field.type = FieldDescriptorProto.Type.Value(f"TYPE_{type.upper()}")
    if default:
        field.default_value = default[-1]


def _add_values(enum: EnumDescriptorProto, values: str) -> None:
    for value in values.split():
        name, _, number = value.partition("=")
        enum.value.add(name=name, number=int(number))
