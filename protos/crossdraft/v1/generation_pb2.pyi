from crossdraft.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GenerateRequest(_message.Message):
    __slots__ = ("id", "model", "text", "ids", "chat", "options", "drafter", "method", "num_speculative_tokens", "max_tokens", "drafter_temperature", "seed", "choice", "ignore_eos", "stop", "logprobs", "committed", "allow_inexact", "audit", "overlap", "max_draft_tokens", "min_draft_tokens", "branches", "branch_width", "paths", "speculation", "row_width", "head", "together", "stop_token_ids", "include_stop_str_in_output", "bad_words", "truncate_prompt_tokens", "prompt_logprobs", "tree_nodes", "cache_salt", "add_special_tokens", "alignment_band")
    class Overlap(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        AUTO: _ClassVar[GenerateRequest.Overlap]
        ON: _ClassVar[GenerateRequest.Overlap]
        OFF: _ClassVar[GenerateRequest.Overlap]
    AUTO: GenerateRequest.Overlap
    ON: GenerateRequest.Overlap
    OFF: GenerateRequest.Overlap
    ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    NUM_SPECULATIVE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    ALLOW_INEXACT_FIELD_NUMBER: _ClassVar[int]
    AUDIT_FIELD_NUMBER: _ClassVar[int]
    OVERLAP_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BRANCHES_FIELD_NUMBER: _ClassVar[int]
    BRANCH_WIDTH_FIELD_NUMBER: _ClassVar[int]
    PATHS_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    ROW_WIDTH_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    TOGETHER_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_STR_IN_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TREE_NODES_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    ADD_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ALIGNMENT_BAND_FIELD_NUMBER: _ClassVar[int]
    id: str
    model: str
    text: str
    ids: PromptIds
    chat: Chat
    options: _common_pb2.SamplingOptions
    drafter: str
    method: str
    num_speculative_tokens: int
    max_tokens: int
    drafter_temperature: float
    seed: int
    choice: int
    ignore_eos: bool
    stop: _containers.RepeatedScalarFieldContainer[str]
    logprobs: int
    committed: _containers.RepeatedScalarFieldContainer[int]
    allow_inexact: bool
    audit: bool
    overlap: GenerateRequest.Overlap
    max_draft_tokens: int
    min_draft_tokens: int
    branches: int
    branch_width: int
    paths: int
    speculation: bool
    row_width: int
    head: int
    together: bool
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    include_stop_str_in_output: bool
    bad_words: _containers.RepeatedScalarFieldContainer[str]
    truncate_prompt_tokens: int
    prompt_logprobs: int
    tree_nodes: int
    cache_salt: str
    add_special_tokens: bool
    alignment_band: int
    def __init__(self, id: _Optional[str] = ..., model: _Optional[str] = ..., text: _Optional[str] = ..., ids: _Optional[_Union[PromptIds, _Mapping]] = ..., chat: _Optional[_Union[Chat, _Mapping]] = ..., options: _Optional[_Union[_common_pb2.SamplingOptions, _Mapping]] = ..., drafter: _Optional[str] = ..., method: _Optional[str] = ..., num_speculative_tokens: _Optional[int] = ..., max_tokens: _Optional[int] = ..., drafter_temperature: _Optional[float] = ..., seed: _Optional[int] = ..., choice: _Optional[int] = ..., ignore_eos: _Optional[bool] = ..., stop: _Optional[_Iterable[str]] = ..., logprobs: _Optional[int] = ..., committed: _Optional[_Iterable[int]] = ..., allow_inexact: _Optional[bool] = ..., audit: _Optional[bool] = ..., overlap: _Optional[_Union[GenerateRequest.Overlap, str]] = ..., max_draft_tokens: _Optional[int] = ..., min_draft_tokens: _Optional[int] = ..., branches: _Optional[int] = ..., branch_width: _Optional[int] = ..., paths: _Optional[int] = ..., speculation: _Optional[bool] = ..., row_width: _Optional[int] = ..., head: _Optional[int] = ..., together: _Optional[bool] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., include_stop_str_in_output: _Optional[bool] = ..., bad_words: _Optional[_Iterable[str]] = ..., truncate_prompt_tokens: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., tree_nodes: _Optional[int] = ..., cache_salt: _Optional[str] = ..., add_special_tokens: _Optional[bool] = ..., alignment_band: _Optional[int] = ...) -> None: ...

class PromptIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Chat(_message.Message):
    __slots__ = ("messages", "add_generation_prompt", "continue_final_message", "template_kwargs")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    ADD_GENERATION_PROMPT_FIELD_NUMBER: _ClassVar[int]
    CONTINUE_FINAL_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_KWARGS_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    add_generation_prompt: bool
    continue_final_message: bool
    template_kwargs: str
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ..., add_generation_prompt: _Optional[bool] = ..., continue_final_message: _Optional[bool] = ..., template_kwargs: _Optional[str] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content", "fields")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    fields: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ..., fields: _Optional[str] = ...) -> None: ...

class GenerateReply(_message.Message):
    __slots__ = ("token", "ended", "prompt", "more")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    token: Token
    ended: Ended
    prompt: PromptTokens
    more: _containers.RepeatedCompositeFieldContainer[Token]
    def __init__(self, token: _Optional[_Union[Token, _Mapping]] = ..., ended: _Optional[_Union[Ended, _Mapping]] = ..., prompt: _Optional[_Union[PromptTokens, _Mapping]] = ..., more: _Optional[_Iterable[_Union[Token, _Mapping]]] = ...) -> None: ...

class PromptTokens(_message.Message):
    __slots__ = ("tokens",)
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedCompositeFieldContainer[Token]
    def __init__(self, tokens: _Optional[_Iterable[_Union[Token, _Mapping]]] = ...) -> None: ...

class Token(_message.Message):
    __slots__ = ("id", "raw", "text", "kind", "log_probability", "top", "milliseconds", "names", "rank")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        UNKNOWN: _ClassVar[Token.Kind]
        ACCEPTED: _ClassVar[Token.Kind]
        CORRECTED: _ClassVar[Token.Kind]
        BONUS: _ClassVar[Token.Kind]
    UNKNOWN: Token.Kind
    ACCEPTED: Token.Kind
    CORRECTED: Token.Kind
    BONUS: Token.Kind
    class NamesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: str
        def __init__(self, key: _Optional[int] = ..., value: _Optional[str] = ...) -> None: ...
    ID_FIELD_NUMBER: _ClassVar[int]
    RAW_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    LOG_PROBABILITY_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    MILLISECONDS_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    id: int
    raw: bytes
    text: str
    kind: Token.Kind
    log_probability: float
    top: _containers.RepeatedCompositeFieldContainer[Candidate]
    milliseconds: float
    names: _containers.ScalarMap[int, str]
    rank: int
    def __init__(self, id: _Optional[int] = ..., raw: _Optional[bytes] = ..., text: _Optional[str] = ..., kind: _Optional[_Union[Token.Kind, str]] = ..., log_probability: _Optional[float] = ..., top: _Optional[_Iterable[_Union[Candidate, _Mapping]]] = ..., milliseconds: _Optional[float] = ..., names: _Optional[_Mapping[int, str]] = ..., rank: _Optional[int] = ...) -> None: ...

class Candidate(_message.Message):
    __slots__ = ("id", "raw", "log_probability")
    ID_FIELD_NUMBER: _ClassVar[int]
    RAW_FIELD_NUMBER: _ClassVar[int]
    LOG_PROBABILITY_FIELD_NUMBER: _ClassVar[int]
    id: int
    raw: bytes
    log_probability: float
    def __init__(self, id: _Optional[int] = ..., raw: _Optional[bytes] = ..., log_probability: _Optional[float] = ...) -> None: ...

class Ended(_message.Message):
    __slots__ = ("id", "reason", "statistics")
    class Reason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        UNKNOWN: _ClassVar[Ended.Reason]
        STOP: _ClassVar[Ended.Reason]
        LENGTH: _ClassVar[Ended.Reason]
        CANCELLED: _ClassVar[Ended.Reason]
        FAILED: _ClassVar[Ended.Reason]
    UNKNOWN: Ended.Reason
    STOP: Ended.Reason
    LENGTH: Ended.Reason
    CANCELLED: Ended.Reason
    FAILED: Ended.Reason
    ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    STATISTICS_FIELD_NUMBER: _ClassVar[int]
    id: str
    reason: Ended.Reason
    statistics: Statistics
    def __init__(self, id: _Optional[str] = ..., reason: _Optional[_Union[Ended.Reason, str]] = ..., statistics: _Optional[_Union[Statistics, _Mapping]] = ...) -> None: ...

class Statistics(_message.Message):
    __slots__ = ("method", "num_speculative_tokens", "prompt_tokens", "tokens", "accepted", "corrected", "bonus", "passes", "row_misses", "rows_fetched", "epochs", "draft_tokens", "stood_aside", "drafter_lost", "seconds", "first_token_seconds", "drafter_seconds", "target_seconds", "wire_seconds", "verification_seconds", "bytes_sent", "bytes_received", "scores", "audited", "drafted_at", "judged_at", "accepted_at", "rows_completed", "drafters_lost", "targets_lost", "rewinds", "branches", "branch_tokens", "branches_tried", "branches_hit", "stalls", "speculated", "events", "target_bytes", "drafter_bytes", "idle_seconds", "target_lane_seconds", "runs", "undrafted", "lanes", "settings", "drafter")
    class SettingsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    METHOD_FIELD_NUMBER: _ClassVar[int]
    NUM_SPECULATIVE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    CORRECTED_FIELD_NUMBER: _ClassVar[int]
    BONUS_FIELD_NUMBER: _ClassVar[int]
    PASSES_FIELD_NUMBER: _ClassVar[int]
    ROW_MISSES_FIELD_NUMBER: _ClassVar[int]
    ROWS_FETCHED_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOOD_ASIDE_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_LOST_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TARGET_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WIRE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    VERIFICATION_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BYTES_SENT_FIELD_NUMBER: _ClassVar[int]
    BYTES_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    AUDITED_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_AT_FIELD_NUMBER: _ClassVar[int]
    JUDGED_AT_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_AT_FIELD_NUMBER: _ClassVar[int]
    ROWS_COMPLETED_FIELD_NUMBER: _ClassVar[int]
    DRAFTERS_LOST_FIELD_NUMBER: _ClassVar[int]
    TARGETS_LOST_FIELD_NUMBER: _ClassVar[int]
    REWINDS_FIELD_NUMBER: _ClassVar[int]
    BRANCHES_FIELD_NUMBER: _ClassVar[int]
    BRANCH_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BRANCHES_TRIED_FIELD_NUMBER: _ClassVar[int]
    BRANCHES_HIT_FIELD_NUMBER: _ClassVar[int]
    STALLS_FIELD_NUMBER: _ClassVar[int]
    SPECULATED_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    TARGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_BYTES_FIELD_NUMBER: _ClassVar[int]
    IDLE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TARGET_LANE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    UNDRAFTED_FIELD_NUMBER: _ClassVar[int]
    LANES_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    method: str
    num_speculative_tokens: int
    prompt_tokens: int
    tokens: int
    accepted: int
    corrected: int
    bonus: int
    passes: int
    row_misses: int
    rows_fetched: int
    epochs: int
    draft_tokens: int
    stood_aside: int
    drafter_lost: str
    seconds: float
    first_token_seconds: float
    drafter_seconds: float
    target_seconds: float
    wire_seconds: float
    verification_seconds: float
    bytes_sent: int
    bytes_received: int
    scores: int
    audited: int
    drafted_at: _containers.RepeatedScalarFieldContainer[int]
    judged_at: _containers.RepeatedScalarFieldContainer[int]
    accepted_at: _containers.RepeatedScalarFieldContainer[int]
    rows_completed: int
    drafters_lost: int
    targets_lost: int
    rewinds: int
    branches: int
    branch_tokens: int
    branches_tried: int
    branches_hit: int
    stalls: int
    speculated: int
    events: int
    target_bytes: int
    drafter_bytes: int
    idle_seconds: float
    target_lane_seconds: float
    runs: int
    undrafted: str
    lanes: _containers.RepeatedCompositeFieldContainer[Lane]
    settings: _containers.ScalarMap[str, float]
    drafter: str
    def __init__(self, method: _Optional[str] = ..., num_speculative_tokens: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., tokens: _Optional[int] = ..., accepted: _Optional[int] = ..., corrected: _Optional[int] = ..., bonus: _Optional[int] = ..., passes: _Optional[int] = ..., row_misses: _Optional[int] = ..., rows_fetched: _Optional[int] = ..., epochs: _Optional[int] = ..., draft_tokens: _Optional[int] = ..., stood_aside: _Optional[int] = ..., drafter_lost: _Optional[str] = ..., seconds: _Optional[float] = ..., first_token_seconds: _Optional[float] = ..., drafter_seconds: _Optional[float] = ..., target_seconds: _Optional[float] = ..., wire_seconds: _Optional[float] = ..., verification_seconds: _Optional[float] = ..., bytes_sent: _Optional[int] = ..., bytes_received: _Optional[int] = ..., scores: _Optional[int] = ..., audited: _Optional[int] = ..., drafted_at: _Optional[_Iterable[int]] = ..., judged_at: _Optional[_Iterable[int]] = ..., accepted_at: _Optional[_Iterable[int]] = ..., rows_completed: _Optional[int] = ..., drafters_lost: _Optional[int] = ..., targets_lost: _Optional[int] = ..., rewinds: _Optional[int] = ..., branches: _Optional[int] = ..., branch_tokens: _Optional[int] = ..., branches_tried: _Optional[int] = ..., branches_hit: _Optional[int] = ..., stalls: _Optional[int] = ..., speculated: _Optional[int] = ..., events: _Optional[int] = ..., target_bytes: _Optional[int] = ..., drafter_bytes: _Optional[int] = ..., idle_seconds: _Optional[float] = ..., target_lane_seconds: _Optional[float] = ..., runs: _Optional[int] = ..., undrafted: _Optional[str] = ..., lanes: _Optional[_Iterable[_Union[Lane, _Mapping]]] = ..., settings: _Optional[_Mapping[str, float]] = ..., drafter: _Optional[str] = ...) -> None: ...

class Lane(_message.Message):
    __slots__ = ("role", "bytes_sent", "bytes_received", "trip_counts", "trip_seconds", "queued_seconds", "model_seconds", "codec_seconds", "open_seconds", "idle_seconds", "lost")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    BYTES_SENT_FIELD_NUMBER: _ClassVar[int]
    BYTES_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    TRIP_COUNTS_FIELD_NUMBER: _ClassVar[int]
    TRIP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    MODEL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CODEC_SECONDS_FIELD_NUMBER: _ClassVar[int]
    OPEN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    IDLE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    role: str
    bytes_sent: int
    bytes_received: int
    trip_counts: _containers.RepeatedScalarFieldContainer[int]
    trip_seconds: float
    queued_seconds: float
    model_seconds: float
    codec_seconds: float
    open_seconds: float
    idle_seconds: float
    lost: str
    def __init__(self, role: _Optional[str] = ..., bytes_sent: _Optional[int] = ..., bytes_received: _Optional[int] = ..., trip_counts: _Optional[_Iterable[int]] = ..., trip_seconds: _Optional[float] = ..., queued_seconds: _Optional[float] = ..., model_seconds: _Optional[float] = ..., codec_seconds: _Optional[float] = ..., open_seconds: _Optional[float] = ..., idle_seconds: _Optional[float] = ..., lost: _Optional[str] = ...) -> None: ...

class ModelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ModelsReply(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[Model]
    def __init__(self, models: _Optional[_Iterable[_Union[Model, _Mapping]]] = ...) -> None: ...

class Model(_message.Message):
    __slots__ = ("name", "created", "context", "drafters", "methods", "chats")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CREATED_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    DRAFTERS_FIELD_NUMBER: _ClassVar[int]
    METHODS_FIELD_NUMBER: _ClassVar[int]
    CHATS_FIELD_NUMBER: _ClassVar[int]
    name: str
    created: int
    context: int
    drafters: _containers.RepeatedScalarFieldContainer[str]
    methods: _containers.RepeatedScalarFieldContainer[str]
    chats: bool
    def __init__(self, name: _Optional[str] = ..., created: _Optional[int] = ..., context: _Optional[int] = ..., drafters: _Optional[_Iterable[str]] = ..., methods: _Optional[_Iterable[str]] = ..., chats: _Optional[bool] = ...) -> None: ...
