"""Model families behind one interface, with their codecs and text encoders."""

import logging

# Where torchao is installed, diffusers imports it, and both log what kernels other devices lack.
for _name in ("torchao", "torch.utils._pytree", "diffusers.quantizers.torchao"):
    logging.getLogger(_name).setLevel(logging.ERROR)
