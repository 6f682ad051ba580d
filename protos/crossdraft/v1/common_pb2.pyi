from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Description(_message.Message):
    __slots__ = ("model", "tokenizer_json", "controls", "stops", "vocabulary_size", "context", "fingerprint", "affinity", "copies", "chat_template", "defaults", "hidden_size")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_JSON_FIELD_NUMBER: _ClassVar[int]
    CONTROLS_FIELD_NUMBER: _ClassVar[int]
    STOPS_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_SIZE_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    AFFINITY_FIELD_NUMBER: _ClassVar[int]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    DEFAULTS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    model: str
    tokenizer_json: str
    controls: _containers.RepeatedCompositeFieldContainer[Control]
    stops: _containers.RepeatedScalarFieldContainer[int]
    vocabulary_size: int
    context: int
    fingerprint: str
    affinity: str
    copies: bool
    chat_template: ChatTemplate
    defaults: SamplingDefaults
    hidden_size: int
    def __init__(self, model: _Optional[str] = ..., tokenizer_json: _Optional[str] = ..., controls: _Optional[_Iterable[_Union[Control, _Mapping]]] = ..., stops: _Optional[_Iterable[int]] = ..., vocabulary_size: _Optional[int] = ..., context: _Optional[int] = ..., fingerprint: _Optional[str] = ..., affinity: _Optional[str] = ..., copies: _Optional[bool] = ..., chat_template: _Optional[_Union[ChatTemplate, _Mapping]] = ..., defaults: _Optional[_Union[SamplingDefaults, _Mapping]] = ..., hidden_size: _Optional[int] = ...) -> None: ...

class SamplingDefaults(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_tokens", "most_tokens")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MOST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    max_tokens: int
    most_tokens: int
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., max_tokens: _Optional[int] = ..., most_tokens: _Optional[int] = ...) -> None: ...

class ChatTemplate(_message.Message):
    __slots__ = ("source", "tokens")
    class TokensEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    source: str
    tokens: _containers.ScalarMap[str, str]
    def __init__(self, source: _Optional[str] = ..., tokens: _Optional[_Mapping[str, str]] = ...) -> None: ...

class Control(_message.Message):
    __slots__ = ("id", "role")
    ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    id: int
    role: str
    def __init__(self, id: _Optional[int] = ..., role: _Optional[str] = ...) -> None: ...

class Opened(_message.Message):
    __slots__ = ("fingerprint",)
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    fingerprint: str
    def __init__(self, fingerprint: _Optional[str] = ...) -> None: ...

class CloseSession(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SessionEnded(_message.Message):
    __slots__ = ("code", "text")
    CODE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    code: int
    text: str
    def __init__(self, code: _Optional[int] = ..., text: _Optional[str] = ...) -> None: ...

class SamplingOptions(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "logit_bias", "frequency_penalty", "allowed_token_ids", "bad_word_ids", "min_tokens", "end_ids", "grammar")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORD_IDS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    END_IDS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    logit_bias: _containers.RepeatedCompositeFieldContainer[LogitBias]
    frequency_penalty: float
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bad_word_ids: _containers.RepeatedCompositeFieldContainer[Ids]
    min_tokens: int
    end_ids: _containers.RepeatedScalarFieldContainer[int]
    grammar: Grammar
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., logit_bias: _Optional[_Iterable[_Union[LogitBias, _Mapping]]] = ..., frequency_penalty: _Optional[float] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., bad_word_ids: _Optional[_Iterable[_Union[Ids, _Mapping]]] = ..., min_tokens: _Optional[int] = ..., end_ids: _Optional[_Iterable[int]] = ..., grammar: _Optional[_Union[Grammar, _Mapping]] = ...) -> None: ...

class Grammar(_message.Message):
    __slots__ = ("kind", "text")
    KIND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    kind: str
    text: str
    def __init__(self, kind: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...

class Ids(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class LogitBias(_message.Message):
    __slots__ = ("id", "bias")
    ID_FIELD_NUMBER: _ClassVar[int]
    BIAS_FIELD_NUMBER: _ClassVar[int]
    id: int
    bias: float
    def __init__(self, id: _Optional[int] = ..., bias: _Optional[float] = ...) -> None: ...

class NoiseKey(_message.Message):
    __slots__ = ("seed", "choice")
    SEED_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    seed: int
    choice: int
    def __init__(self, seed: _Optional[int] = ..., choice: _Optional[int] = ...) -> None: ...

class HiddenStates(_message.Message):
    __slots__ = ("places", "states")
    PLACES_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    places: _containers.RepeatedScalarFieldContainer[int]
    states: bytes
    def __init__(self, places: _Optional[_Iterable[int]] = ..., states: _Optional[bytes] = ...) -> None: ...

class Numbers(_message.Message):
    __slots__ = ("count", "size", "data")
    COUNT_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    count: int
    size: int
    data: bytes
    def __init__(self, count: _Optional[int] = ..., size: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class IdLists(_message.Message):
    __slots__ = ("counts", "ids")
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    counts: _containers.RepeatedScalarFieldContainer[int]
    ids: Numbers
    def __init__(self, counts: _Optional[_Iterable[int]] = ..., ids: _Optional[_Union[Numbers, _Mapping]] = ...) -> None: ...

class Rows(_message.Message):
    __slots__ = ("ids", "large", "small", "logged", "log_probabilities", "likely", "likely_log_probabilities")
    IDS_FIELD_NUMBER: _ClassVar[int]
    LARGE_FIELD_NUMBER: _ClassVar[int]
    SMALL_FIELD_NUMBER: _ClassVar[int]
    LOGGED_FIELD_NUMBER: _ClassVar[int]
    LOG_PROBABILITIES_FIELD_NUMBER: _ClassVar[int]
    LIKELY_FIELD_NUMBER: _ClassVar[int]
    LIKELY_LOG_PROBABILITIES_FIELD_NUMBER: _ClassVar[int]
    ids: IdLists
    large: Numbers
    small: Numbers
    logged: _containers.RepeatedScalarFieldContainer[int]
    log_probabilities: _containers.RepeatedScalarFieldContainer[float]
    likely: _containers.RepeatedScalarFieldContainer[int]
    likely_log_probabilities: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, ids: _Optional[_Union[IdLists, _Mapping]] = ..., large: _Optional[_Union[Numbers, _Mapping]] = ..., small: _Optional[_Union[Numbers, _Mapping]] = ..., logged: _Optional[_Iterable[int]] = ..., log_probabilities: _Optional[_Iterable[float]] = ..., likely: _Optional[_Iterable[int]] = ..., likely_log_probabilities: _Optional[_Iterable[float]] = ...) -> None: ...

class WholeRow(_message.Message):
    __slots__ = ("ids", "probabilities", "log_probabilities")
    IDS_FIELD_NUMBER: _ClassVar[int]
    PROBABILITIES_FIELD_NUMBER: _ClassVar[int]
    LOG_PROBABILITIES_FIELD_NUMBER: _ClassVar[int]
    ids: Numbers
    probabilities: bytes
    log_probabilities: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, ids: _Optional[_Union[Numbers, _Mapping]] = ..., probabilities: _Optional[bytes] = ..., log_probabilities: _Optional[_Iterable[float]] = ...) -> None: ...
