"""A target's session without a link: tests are its client."""

from crossdraft.engine.served_model import RunningModel
from crossdraft.target.service import Reply, Request, TargetSession
from crossdraft.types.messages import OpenTarget, Pass, PassDone
from tests.rpc.linked import Said

PROMPT = (40, 41, 42, 300, 7)


class Talk:
    """A session of its own, and what it says."""

    def __init__(self, model: RunningModel, opening: OpenTarget) -> None:
        self.said: Said[Reply] = Said()
        self.session = TargetSession(model, opening, self.said)

    def tell(self, *requests: Request) -> None:
        """They come at once."""
        for request in requests:
            self.session.receive(request)

    async def ask(self, request: Request) -> Reply:
        """The next reply; raises what ended the session."""
        self.tell(request)
        return await self.said.next()

    async def passed(self, request: Pass) -> PassDone:
        """One pass."""
        done = await self.ask(request)
        assert isinstance(done, PassDone)
        assert done.number == request.number
        assert not done.more
        return done

    async def drawn(self, last: int) -> list[PassDone]:
        """The replies up to the end of that pass."""
        replies: list[PassDone] = []
        while not replies or replies[-1].number != last or replies[-1].more:
            reply = await self.said.next()
            assert isinstance(reply, PassDone)
            replies.append(reply)
        return replies

    async def draw(self, run: Pass) -> list[PassDone]:
        """The replies to one run."""
        self.tell(run)
        return await self.drawn(run.number)

    def close(self) -> None:
        """Ends it."""
        self.session.close()
