# Copyright 2025 Individual Contributor: the verl-precision authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""Precision of verl's training engines and rollouts: dtypes.

The package needs only torch and the standard library. verl's engines, workers and configs call it; it calls none of
them. Import from the package, not from its modules:

- ``dtypes``: :class:`Precision`, the dtypes of an engine, resolved once from its config.
- ``roles``: the dtype keys of engines.

Why fp16: with it on both sides, the log-probabilities of trainer and rollout agree far better than with bf16 (Qi et
al. 2025, "Defeating the Training-Inference Mismatch via FP16", arXiv 2510.26788). fp16 needs a loss scale (verl PRs
#4036 and #6150).

Where no key requests a precision (:func:`requests_precision`), verl computes as it does without the package.
"""

from .dtypes import UNREQUESTED, Precision, dtype_name, requests_precision, to_dtype
from .roles import apply_engine_dtype

__all__ = [
    "UNREQUESTED",
    "Precision",
    "apply_engine_dtype",
    "dtype_name",
    "requests_precision",
    "to_dtype",
]
