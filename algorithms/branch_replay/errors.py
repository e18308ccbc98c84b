"""What is raised where a silent wrong gradient would be the alternative."""


class SelfCheckError(RuntimeError):
    """The engine's own check failed: the numbers in the message are those that differ."""


class StaleStateError(RuntimeError):
    """A captured prompt is older than the weights it would be used with."""
