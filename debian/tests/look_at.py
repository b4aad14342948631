# SPDX-License-Identifier: Apache-2.0
"""look_at.py SMALL LARGE: is LARGE the picture SMALL, twice as wide and high?"""

import sys

import numpy as np
from PIL import Image

small, large = (Image.open(path).convert("RGB") for path in sys.argv[1:3])
if large.size != (2 * small.width, 2 * small.height):
    raise SystemExit(f"{large.size} is not twice {small.size}")
plain = small.resize(large.size, Image.Resampling.BICUBIC)
difference = np.asarray(plain, np.float64) - np.asarray(large, np.float64)
worst = float(np.sqrt((difference**2).mean()))
if worst > 6:
    raise SystemExit(f"the pictures differ by {worst:.1f} of 255")
print(f"{large.size}, {worst:.2f} of 255 beside a bicubic enlargement")
