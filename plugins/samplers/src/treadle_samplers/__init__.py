"""The built-in sampler stages of treadle, one module each, registered through the same door as anyone's."""

from treadle_samplers.adaptive_p import AdaptiveP
from treadle_samplers.allowed_token_ids import AllowedTokenIds
from treadle_samplers.bad_words import BadWords
from treadle_samplers.categorical import Categorical
from treadle_samplers.dry import Dry
from treadle_samplers.epsilon_cutoff import EpsilonCutoff
from treadle_samplers.eta_cutoff import EtaCutoff
from treadle_samplers.greedy import Greedy
from treadle_samplers.logit_bias import LogitBias
from treadle_samplers.min_p import MinP
from treadle_samplers.min_tokens import MinTokens
from treadle_samplers.mirostat import Mirostat
from treadle_samplers.no_repeat_ngram import NoRepeatNgram
from treadle_samplers.p_less import PLess
from treadle_samplers.penalties import Penalties
from treadle_samplers.suppress_tokens import SuppressTokens
from treadle_samplers.temperature import Temperature
from treadle_samplers.tfs import TailFree
from treadle_samplers.top_a import TopA
from treadle_samplers.top_h import TopH
from treadle_samplers.top_k import TopK
from treadle_samplers.top_n_sigma import TopNSigma
from treadle_samplers.top_p import TopP
from treadle_samplers.typical_p import TypicalP
from treadle_samplers.xtc import Xtc

__all__ = [
    "AdaptiveP",
    "AllowedTokenIds",
    "BadWords",
    "Categorical",
    "Dry",
    "EpsilonCutoff",
    "EtaCutoff",
    "Greedy",
    "LogitBias",
    "MinP",
    "MinTokens",
    "Mirostat",
    "NoRepeatNgram",
    "PLess",
    "Penalties",
    "SuppressTokens",
    "TailFree",
    "Temperature",
    "TopA",
    "TopH",
    "TopK",
    "TopNSigma",
    "TopP",
    "TypicalP",
    "Xtc",
]
