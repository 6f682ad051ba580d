from crossdraft.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class VerifyRequest(_message.Message):
    __slots__ = ("open", "next_pass", "fetch")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    NEXT_PASS_FIELD_NUMBER: _ClassVar[int]
    FETCH_FIELD_NUMBER: _ClassVar[int]
    open: OpenTarget
    next_pass: Pass
    fetch: FetchRow
    def __init__(self, open: _Optional[_Union[OpenTarget, _Mapping]] = ..., next_pass: _Optional[_Union[Pass, _Mapping]] = ..., fetch: _Optional[_Union[FetchRow, _Mapping]] = ...) -> None: ...

class VerifyReply(_message.Message):
    __slots__ = ("opened", "done", "fetched")
    OPENED_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    FETCHED_FIELD_NUMBER: _ClassVar[int]
    opened: _common_pb2.Opened
    done: PassDone
    fetched: RowFetched
    def __init__(self, opened: _Optional[_Union[_common_pb2.Opened, _Mapping]] = ..., done: _Optional[_Union[PassDone, _Mapping]] = ..., fetched: _Optional[_Union[RowFetched, _Mapping]] = ...) -> None: ...

class OpenTarget(_message.Message):
    __slots__ = ("prompt", "options", "noise", "head")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    NOISE_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    prompt: _containers.RepeatedScalarFieldContainer[int]
    options: _common_pb2.SamplingOptions
    noise: _common_pb2.NoiseKey
    head: int
    def __init__(self, prompt: _Optional[_Iterable[int]] = ..., options: _Optional[_Union[_common_pb2.SamplingOptions, _Mapping]] = ..., noise: _Optional[_Union[_common_pb2.NoiseKey, _Mapping]] = ..., head: _Optional[int] = ...) -> None: ...

class Pass(_message.Message):
    __slots__ = ("number", "committed", "tree", "listed", "wanted")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    TREE_FIELD_NUMBER: _ClassVar[int]
    LISTED_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    number: int
    committed: _containers.RepeatedScalarFieldContainer[int]
    tree: TokenTree
    listed: _containers.RepeatedCompositeFieldContainer[_common_pb2.IdList]
    wanted: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, number: _Optional[int] = ..., committed: _Optional[_Iterable[int]] = ..., tree: _Optional[_Union[TokenTree, _Mapping]] = ..., listed: _Optional[_Iterable[_Union[_common_pb2.IdList, _Mapping]]] = ..., wanted: _Optional[_Iterable[int]] = ...) -> None: ...

class TokenTree(_message.Message):
    __slots__ = ("tokens", "parents")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    parents: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, tokens: _Optional[_Iterable[int]] = ..., parents: _Optional[_Iterable[int]] = ...) -> None: ...

class PassDone(_message.Message):
    __slots__ = ("number", "nodes", "seconds")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    number: int
    nodes: _containers.RepeatedCompositeFieldContainer[Node]
    seconds: float
    def __init__(self, number: _Optional[int] = ..., nodes: _Optional[_Iterable[_Union[Node, _Mapping]]] = ..., seconds: _Optional[float] = ...) -> None: ...

class Node(_message.Message):
    __slots__ = ("row", "sample")
    ROW_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    row: _common_pb2.Row
    sample: Sample
    def __init__(self, row: _Optional[_Union[_common_pb2.Row, _Mapping]] = ..., sample: _Optional[_Union[Sample, _Mapping]] = ...) -> None: ...

class Sample(_message.Message):
    __slots__ = ("token", "log_probability")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    LOG_PROBABILITY_FIELD_NUMBER: _ClassVar[int]
    token: int
    log_probability: float
    def __init__(self, token: _Optional[int] = ..., log_probability: _Optional[float] = ...) -> None: ...

class FetchRow(_message.Message):
    __slots__ = ("number", "node", "listed")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    LISTED_FIELD_NUMBER: _ClassVar[int]
    number: int
    node: int
    listed: _common_pb2.IdList
    def __init__(self, number: _Optional[int] = ..., node: _Optional[int] = ..., listed: _Optional[_Union[_common_pb2.IdList, _Mapping]] = ...) -> None: ...

class RowFetched(_message.Message):
    __slots__ = ("number", "node", "row")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    ROW_FIELD_NUMBER: _ClassVar[int]
    number: int
    node: int
    row: _common_pb2.Row
    def __init__(self, number: _Optional[int] = ..., node: _Optional[int] = ..., row: _Optional[_Union[_common_pb2.Row, _Mapping]] = ...) -> None: ...
