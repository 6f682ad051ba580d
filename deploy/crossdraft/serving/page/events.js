// Server-sent events of a response's body.

/** Yields the data of each event as text, as they arrive. */
export async function* dataOf(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const blocks = (rest + value).split(/\r?\n\r?\n/);
      rest = blocks.pop();
      yield* blocks.map(textOf).filter((text) => text !== "");
    }
  } finally {
    reader.cancel().catch(() => {}); // it may have failed already, which whoever reads was told
  }
}

function textOf(block) {
  const lines = block.split(/\r?\n/).filter((line) => line.startsWith("data:"));
  return lines.map((line) => line.slice(5).replace(/^ /, "")).join("\n");
}
