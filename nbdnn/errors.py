"""Everything nbdnn raises or warns."""


class InvalidProblem(ValueError):
    """Operands, shapes or arguments disagree. The message names the operand, the axis and both numbers."""


class InvalidType(InvalidProblem, TypeError):
    """A dtype or a rank that the function does not take."""


class UnsupportedProblem(NotImplementedError):
    """No implementation is correct here. The message gives every candidate's reason, one a line."""


class ConfigError(ValueError):
    """An unknown flag, or a value that the flag does not take. The message lists the valid ones."""


class CudaError(RuntimeError):
    """A call of the CUDA driver or compiler failed. The message names the call, the status and what CUDA says of it."""


class CudnnError(RuntimeError):
    """A call of cuDNN failed. The message names the function, the status and cuDNN's own last error text."""


class DatabaseError(RuntimeError):
    """A tuning database could not be read, written or understood. The message names the file."""


class NbdnnWarning(UserWarning):
    """Speed or persistence is degraded; results are right."""
