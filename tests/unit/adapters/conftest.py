"""One thread, as ranks have: with several, torch rounds differently from machine to machine."""

import torch

torch.set_num_threads(1)
