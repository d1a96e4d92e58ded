"""What is known of torch's types, by family. :class:`graphir.ir.optypes.record.OperatorType` says what a fact means."""
