"""One reader per format; each module has ``detect(scan) -> list[Artifact]``."""
