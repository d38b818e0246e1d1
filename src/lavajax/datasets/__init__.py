"""Data sets, prepared once with TFDS from files that the user names. Nothing is downloaded.

One module per data set reads it as published; ``builders`` has the TFDS builders. Importing this
package imports none of the optional packages: what needs them imports them.
"""

from lavajax.datasets.images import ImageArrays as ImageArrays
from lavajax.datasets.mini_imagenet import load_mini_imagenet as load_mini_imagenet
from lavajax.datasets.omniglot import load_omniglot as load_omniglot
