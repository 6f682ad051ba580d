from crossdraft.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DraftRequests(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[DraftRequest]
    def __init__(self, requests: _Optional[_Iterable[_Union[DraftRequest, _Mapping]]] = ...) -> None: ...

class DraftReplies(_message.Message):
    __slots__ = ("replies", "rows")
    REPLIES_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    replies: _containers.RepeatedCompositeFieldContainer[DraftReply]
    rows: _common_pb2.Rows
    def __init__(self, replies: _Optional[_Iterable[_Union[DraftReply, _Mapping]]] = ..., rows: _Optional[_Union[_common_pb2.Rows, _Mapping]] = ...) -> None: ...

class DraftRequest(_message.Message):
    __slots__ = ("session", "open", "draft", "score", "advance", "close", "request_id")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    ADVANCE_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    session: int
    open: OpenDrafter
    draft: Draft
    score: Score
    advance: Advance
    close: _common_pb2.CloseSession
    request_id: str
    def __init__(self, session: _Optional[int] = ..., open: _Optional[_Union[OpenDrafter, _Mapping]] = ..., draft: _Optional[_Union[Draft, _Mapping]] = ..., score: _Optional[_Union[Score, _Mapping]] = ..., advance: _Optional[_Union[Advance, _Mapping]] = ..., close: _Optional[_Union[_common_pb2.CloseSession, _Mapping]] = ..., request_id: _Optional[str] = ...) -> None: ...

class DraftReply(_message.Message):
    __slots__ = ("session", "opened", "drafted", "scored", "ended")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_FIELD_NUMBER: _ClassVar[int]
    SCORED_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    session: int
    opened: _common_pb2.Opened
    drafted: Drafted
    scored: Scored
    ended: _common_pb2.SessionEnded
    def __init__(self, session: _Optional[int] = ..., opened: _Optional[_Union[_common_pb2.Opened, _Mapping]] = ..., drafted: _Optional[_Union[Drafted, _Mapping]] = ..., scored: _Optional[_Union[Scored, _Mapping]] = ..., ended: _Optional[_Union[_common_pb2.SessionEnded, _Mapping]] = ...) -> None: ...

class OpenDrafter(_message.Message):
    __slots__ = ("prompt", "options", "noise", "row_width", "allowed", "redistribute", "audited", "templated", "scope")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    NOISE_FIELD_NUMBER: _ClassVar[int]
    ROW_WIDTH_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_FIELD_NUMBER: _ClassVar[int]
    REDISTRIBUTE_FIELD_NUMBER: _ClassVar[int]
    AUDITED_FIELD_NUMBER: _ClassVar[int]
    TEMPLATED_FIELD_NUMBER: _ClassVar[int]
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    prompt: bytes
    options: _common_pb2.SamplingOptions
    noise: _common_pb2.NoiseKey
    row_width: int
    allowed: _common_pb2.Numbers
    redistribute: str
    audited: bool
    templated: bool
    scope: str
    def __init__(self, prompt: _Optional[bytes] = ..., options: _Optional[_Union[_common_pb2.SamplingOptions, _Mapping]] = ..., noise: _Optional[_Union[_common_pb2.NoiseKey, _Mapping]] = ..., row_width: _Optional[int] = ..., allowed: _Optional[_Union[_common_pb2.Numbers, _Mapping]] = ..., redistribute: _Optional[str] = ..., audited: _Optional[bool] = ..., templated: _Optional[bool] = ..., scope: _Optional[str] = ...) -> None: ...

class Draft(_message.Message):
    __slots__ = ("epoch", "offset", "letters", "count", "chunk", "branch_depth", "branch_width", "adopt", "first", "tree_nodes", "least_likely", "hidden")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LETTERS_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    BRANCH_DEPTH_FIELD_NUMBER: _ClassVar[int]
    BRANCH_WIDTH_FIELD_NUMBER: _ClassVar[int]
    ADOPT_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    TREE_NODES_FIELD_NUMBER: _ClassVar[int]
    LEAST_LIKELY_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    offset: int
    letters: bytes
    count: int
    chunk: int
    branch_depth: int
    branch_width: int
    adopt: int
    first: int
    tree_nodes: int
    least_likely: float
    hidden: _common_pb2.HiddenStates
    def __init__(self, epoch: _Optional[int] = ..., offset: _Optional[int] = ..., letters: _Optional[bytes] = ..., count: _Optional[int] = ..., chunk: _Optional[int] = ..., branch_depth: _Optional[int] = ..., branch_width: _Optional[int] = ..., adopt: _Optional[int] = ..., first: _Optional[int] = ..., tree_nodes: _Optional[int] = ..., least_likely: _Optional[float] = ..., hidden: _Optional[_Union[_common_pb2.HiddenStates, _Mapping]] = ...) -> None: ...

class Advance(_message.Message):
    __slots__ = ("epoch", "count")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    count: int
    def __init__(self, epoch: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...

class Drafted(_message.Message):
    __slots__ = ("epoch", "tokens", "target_ids", "with_rows", "microseconds", "reason", "first", "branches", "queued_microseconds")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TARGET_IDS_FIELD_NUMBER: _ClassVar[int]
    WITH_ROWS_FIELD_NUMBER: _ClassVar[int]
    MICROSECONDS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    BRANCHES_FIELD_NUMBER: _ClassVar[int]
    QUEUED_MICROSECONDS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    target_ids: bool
    with_rows: bool
    microseconds: int
    reason: str
    first: int
    branches: _containers.RepeatedCompositeFieldContainer[Branch]
    queued_microseconds: int
    def __init__(self, epoch: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., target_ids: _Optional[bool] = ..., with_rows: _Optional[bool] = ..., microseconds: _Optional[int] = ..., reason: _Optional[str] = ..., first: _Optional[int] = ..., branches: _Optional[_Iterable[_Union[Branch, _Mapping]]] = ..., queued_microseconds: _Optional[int] = ...) -> None: ...

class Branch(_message.Message):
    __slots__ = ("number", "offset", "letters", "tokens")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LETTERS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    number: int
    offset: int
    letters: bytes
    tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, number: _Optional[int] = ..., offset: _Optional[int] = ..., letters: _Optional[bytes] = ..., tokens: _Optional[_Iterable[int]] = ...) -> None: ...

class Score(_message.Message):
    __slots__ = ("epoch", "offset", "strings", "tokens")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    STRINGS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    offset: int
    strings: _containers.RepeatedScalarFieldContainer[bytes]
    tokens: int
    def __init__(self, epoch: _Optional[int] = ..., offset: _Optional[int] = ..., strings: _Optional[_Iterable[bytes]] = ..., tokens: _Optional[int] = ...) -> None: ...

class Scored(_message.Message):
    __slots__ = ("epoch", "probabilities", "microseconds")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PROBABILITIES_FIELD_NUMBER: _ClassVar[int]
    MICROSECONDS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    probabilities: _containers.RepeatedScalarFieldContainer[float]
    microseconds: int
    def __init__(self, epoch: _Optional[int] = ..., probabilities: _Optional[_Iterable[float]] = ..., microseconds: _Optional[int] = ...) -> None: ...
