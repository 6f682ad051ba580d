from crossdraft.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class VerifyRequests(_message.Message):
    __slots__ = ("requests", "listed")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    LISTED_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[VerifyRequest]
    listed: _common_pb2.IdLists
    def __init__(self, requests: _Optional[_Iterable[_Union[VerifyRequest, _Mapping]]] = ..., listed: _Optional[_Union[_common_pb2.IdLists, _Mapping]] = ...) -> None: ...

class VerifyReplies(_message.Message):
    __slots__ = ("replies", "rows", "samples")
    REPLIES_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    replies: _containers.RepeatedCompositeFieldContainer[VerifyReply]
    rows: _common_pb2.Rows
    samples: Samples
    def __init__(self, replies: _Optional[_Iterable[_Union[VerifyReply, _Mapping]]] = ..., rows: _Optional[_Union[_common_pb2.Rows, _Mapping]] = ..., samples: _Optional[_Union[Samples, _Mapping]] = ...) -> None: ...

class VerifyRequest(_message.Message):
    __slots__ = ("session", "open", "next_pass", "fetch", "run_to", "close", "score", "request_id")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    NEXT_PASS_FIELD_NUMBER: _ClassVar[int]
    FETCH_FIELD_NUMBER: _ClassVar[int]
    RUN_TO_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    session: int
    open: OpenTarget
    next_pass: Pass
    fetch: FetchRow
    run_to: RunTo
    close: _common_pb2.CloseSession
    score: ScorePrompt
    request_id: str
    def __init__(self, session: _Optional[int] = ..., open: _Optional[_Union[OpenTarget, _Mapping]] = ..., next_pass: _Optional[_Union[Pass, _Mapping]] = ..., fetch: _Optional[_Union[FetchRow, _Mapping]] = ..., run_to: _Optional[_Union[RunTo, _Mapping]] = ..., close: _Optional[_Union[_common_pb2.CloseSession, _Mapping]] = ..., score: _Optional[_Union[ScorePrompt, _Mapping]] = ..., request_id: _Optional[str] = ...) -> None: ...

class VerifyReply(_message.Message):
    __slots__ = ("session", "opened", "done", "fetched", "ended", "scored")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    FETCHED_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    SCORED_FIELD_NUMBER: _ClassVar[int]
    session: int
    opened: _common_pb2.Opened
    done: PassDone
    fetched: RowFetched
    ended: _common_pb2.SessionEnded
    scored: PromptScored
    def __init__(self, session: _Optional[int] = ..., opened: _Optional[_Union[_common_pb2.Opened, _Mapping]] = ..., done: _Optional[_Union[PassDone, _Mapping]] = ..., fetched: _Optional[_Union[RowFetched, _Mapping]] = ..., ended: _Optional[_Union[_common_pb2.SessionEnded, _Mapping]] = ..., scored: _Optional[_Union[PromptScored, _Mapping]] = ...) -> None: ...

class OpenTarget(_message.Message):
    __slots__ = ("prompt", "options", "noise", "head", "likely", "ignore_stops", "stop_ids", "hidden", "impossible")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    NOISE_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    LIKELY_FIELD_NUMBER: _ClassVar[int]
    IGNORE_STOPS_FIELD_NUMBER: _ClassVar[int]
    STOP_IDS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_FIELD_NUMBER: _ClassVar[int]
    IMPOSSIBLE_FIELD_NUMBER: _ClassVar[int]
    prompt: _containers.RepeatedScalarFieldContainer[int]
    options: _common_pb2.SamplingOptions
    noise: _common_pb2.NoiseKey
    head: int
    likely: int
    ignore_stops: bool
    stop_ids: _containers.RepeatedScalarFieldContainer[int]
    hidden: bool
    impossible: bool
    def __init__(self, prompt: _Optional[_Iterable[int]] = ..., options: _Optional[_Union[_common_pb2.SamplingOptions, _Mapping]] = ..., noise: _Optional[_Union[_common_pb2.NoiseKey, _Mapping]] = ..., head: _Optional[int] = ..., likely: _Optional[int] = ..., ignore_stops: _Optional[bool] = ..., stop_ids: _Optional[_Iterable[int]] = ..., hidden: _Optional[bool] = ..., impossible: _Optional[bool] = ...) -> None: ...

class Pass(_message.Message):
    __slots__ = ("number", "committed", "tree", "listed", "wanted", "draws", "run")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    TREE_FIELD_NUMBER: _ClassVar[int]
    LISTED_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    DRAWS_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    number: int
    committed: _containers.RepeatedScalarFieldContainer[int]
    tree: TokenTree
    listed: int
    wanted: _containers.RepeatedScalarFieldContainer[int]
    draws: bool
    run: int
    def __init__(self, number: _Optional[int] = ..., committed: _Optional[_Iterable[int]] = ..., tree: _Optional[_Union[TokenTree, _Mapping]] = ..., listed: _Optional[int] = ..., wanted: _Optional[_Iterable[int]] = ..., draws: _Optional[bool] = ..., run: _Optional[int] = ...) -> None: ...

class ScorePrompt(_message.Message):
    __slots__ = ("first", "likely")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    LIKELY_FIELD_NUMBER: _ClassVar[int]
    first: int
    likely: int
    def __init__(self, first: _Optional[int] = ..., likely: _Optional[int] = ...) -> None: ...

class PromptScored(_message.Message):
    __slots__ = ("first", "samples", "microseconds", "more")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    MICROSECONDS_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    first: int
    samples: int
    microseconds: int
    more: bool
    def __init__(self, first: _Optional[int] = ..., samples: _Optional[int] = ..., microseconds: _Optional[int] = ..., more: _Optional[bool] = ...) -> None: ...

class RunTo(_message.Message):
    __slots__ = ("number", "tokens")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    number: int
    tokens: int
    def __init__(self, number: _Optional[int] = ..., tokens: _Optional[int] = ...) -> None: ...

class TokenTree(_message.Message):
    __slots__ = ("tokens", "parents")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    parents: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, tokens: _Optional[_Iterable[int]] = ..., parents: _Optional[_Iterable[int]] = ...) -> None: ...

class PassDone(_message.Message):
    __slots__ = ("number", "rows", "samples", "microseconds", "queued_microseconds", "more", "forwards", "shared", "fed", "first", "hidden")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    MICROSECONDS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_MICROSECONDS_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    FORWARDS_FIELD_NUMBER: _ClassVar[int]
    SHARED_FIELD_NUMBER: _ClassVar[int]
    FED_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_FIELD_NUMBER: _ClassVar[int]
    number: int
    rows: int
    samples: int
    microseconds: int
    queued_microseconds: int
    more: bool
    forwards: int
    shared: int
    fed: int
    first: int
    hidden: _common_pb2.HiddenStates
    def __init__(self, number: _Optional[int] = ..., rows: _Optional[int] = ..., samples: _Optional[int] = ..., microseconds: _Optional[int] = ..., queued_microseconds: _Optional[int] = ..., more: _Optional[bool] = ..., forwards: _Optional[int] = ..., shared: _Optional[int] = ..., fed: _Optional[int] = ..., first: _Optional[int] = ..., hidden: _Optional[_Union[_common_pb2.HiddenStates, _Mapping]] = ...) -> None: ...

class Samples(_message.Message):
    __slots__ = ("tokens", "log_probabilities", "likely", "likely_log_probabilities", "likely_counts", "ranks")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOG_PROBABILITIES_FIELD_NUMBER: _ClassVar[int]
    LIKELY_FIELD_NUMBER: _ClassVar[int]
    LIKELY_LOG_PROBABILITIES_FIELD_NUMBER: _ClassVar[int]
    LIKELY_COUNTS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    log_probabilities: _containers.RepeatedScalarFieldContainer[float]
    likely: _containers.RepeatedScalarFieldContainer[int]
    likely_log_probabilities: _containers.RepeatedScalarFieldContainer[float]
    likely_counts: _containers.RepeatedScalarFieldContainer[int]
    ranks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, tokens: _Optional[_Iterable[int]] = ..., log_probabilities: _Optional[_Iterable[float]] = ..., likely: _Optional[_Iterable[int]] = ..., likely_log_probabilities: _Optional[_Iterable[float]] = ..., likely_counts: _Optional[_Iterable[int]] = ..., ranks: _Optional[_Iterable[int]] = ...) -> None: ...

class FetchRow(_message.Message):
    __slots__ = ("number", "node", "listed")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    LISTED_FIELD_NUMBER: _ClassVar[int]
    number: int
    node: int
    listed: _common_pb2.Numbers
    def __init__(self, number: _Optional[int] = ..., node: _Optional[int] = ..., listed: _Optional[_Union[_common_pb2.Numbers, _Mapping]] = ...) -> None: ...

class RowFetched(_message.Message):
    __slots__ = ("number", "node", "head", "whole")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    number: int
    node: int
    head: _common_pb2.Rows
    whole: _common_pb2.WholeRow
    def __init__(self, number: _Optional[int] = ..., node: _Optional[int] = ..., head: _Optional[_Union[_common_pb2.Rows, _Mapping]] = ..., whole: _Optional[_Union[_common_pb2.WholeRow, _Mapping]] = ...) -> None: ...
