"""The tables and figures of the paper, one module each; what each offers is ``works.Item``."""
