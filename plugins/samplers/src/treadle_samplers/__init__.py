"""The built-in sampler stages of treadle, one module each, registered through the same door as anyone's."""

from treadle_samplers.categorical import Categorical
from treadle_samplers.greedy import Greedy
from treadle_samplers.min_tokens import MinTokens
from treadle_samplers.temperature import Temperature
from treadle_samplers.top_k import TopK
from treadle_samplers.top_p import TopP

__all__ = ["Categorical", "Greedy", "MinTokens", "Temperature", "TopK", "TopP"]
