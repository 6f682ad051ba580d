"""A target's session without a link: tests are its client."""

from crossdraft.engine.sampling.distributions import LogitsProcessor
from crossdraft.engine.served_model import RunningModel
from crossdraft.rpc.links import Join
from crossdraft.target.service import Reply, TargetSession
from crossdraft.text.grammar import of_letters
from crossdraft.types.messages import OpenTarget, Pass, PassDone
from tests.rpc.linked import Direct

PROMPT = (40, 41, 42, 300, 7)


class Talk(Direct):
    """A session of its own, whose replies are not joined."""

    def __init__(self, model: RunningModel, opening: OpenTarget) -> None:
        size, device = model.description.vocabulary_size, model.thread.engine.device
        processor = LogitsProcessor(opening.options, size, device, opening.prompt)
        grammar = opening.options.grammar
        matchers = [] if grammar is None else [one.matcher(grammar) for one in (model.grammars, of_letters())]
        super().__init__(lambda replies: TargetSession(model, opening, processor, replies, *matchers))

    def send(self, reply: Reply, within: float = 0.0, join: Join[Reply] | None = None) -> None:
        super().send(reply, within)

    async def passed(self, request: Pass) -> PassDone:
        done = await self.answer(request)
        assert done.number == request.number
        assert not done.more
        return done

    async def drawn(self, last: int) -> list[PassDone]:
        replies: list[PassDone] = []
        while not replies or replies[-1].number != last or replies[-1].more:
            reply = await self.receive()
            assert isinstance(reply, PassDone)
            replies.append(reply)
        return replies

    async def draw(self, run: Pass) -> list[PassDone]:
        self.ask(run)
        return await self.drawn(run.number)
