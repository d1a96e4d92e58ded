"""What is known of operator types, beside what torch's schemas say.

:func:`.table.operator_type` assembles one :class:`.record.OperatorType` for each type. :mod:`.own` has graphir's own
types, :mod:`.families` what is known of torch's; :mod:`graphir.ir.registration` adds a user's.
"""
