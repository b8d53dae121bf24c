"""What a training job may import from probing. It needs no daemon and has no dependencies."""

__all__: tuple[str, ...] = ()
