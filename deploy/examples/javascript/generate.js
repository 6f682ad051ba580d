// An output from a server over gRPC: its text on standard output, its figures on standard error.
//
// npm ci
// node generate.js 127.0.0.1:9000 "def main(" --seed 7

import { parseArgs } from "node:util";

import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";

const PROTOS = new URL("../../../protos/", import.meta.url).pathname;
const OPTIONS = {
  model: { type: "string", default: "" }, // by default the server's only one
  key: { type: "string", default: process.env.CROSSDRAFT_API_KEY ?? "" },
  seed: { type: "string" },
  temperature: { type: "string" }, // by default the model's own
  "max-tokens": { type: "string", default: "64" },
};

const { values: given, positionals } = parseArgs({ options: OPTIONS, allowPositionals: true });
const [server, text] = positionals;
if (text === undefined) {
  console.error("usage: node generate.js HOST:PORT PROMPT [--model NAME] [--key KEY] [--seed N] ...");
  process.exit(2);
}

const loaded = protoLoader.loadSync("crossdraft/v1/generation.proto", {
  includeDirs: [PROTOS],
  keepCase: true,
  defaults: true, // fields that are empty are there, too
  enums: String, // names, not numbers
  longs: String, // 64 bits, which a number has not
});
const { Generation } = grpc.loadPackageDefinition(loaded).crossdraft.v1;

const metadata = new grpc.Metadata();
if (given.key) metadata.set("authorization", `Bearer ${given.key}`);

const client = new Generation(server, grpc.credentials.createInsecure());
const call = client.Generate(
  {
    text,
    model: given.model,
    ...(given.temperature !== undefined && { options: { temperature: Number(given.temperature) } }),
    max_tokens: Number(given["max-tokens"]),
    ...(given.seed !== undefined && { seed: given.seed }),
  },
  metadata,
);

process.once("SIGINT", () => call.cancel());
call.on("data", ({ token, ended }) => {
  if (token) process.stdout.write(token.text);
  if (ended) {
    const { tokens, passes, accepted } = ended.statistics;
    process.stdout.write("\n");
    console.error(`${ended.reason}: ${tokens} tokens in ${passes} passes, ${accepted} as drafted`);
  }
});
call.on("error", (error) => {
  const [after] = error.metadata?.get("grpc-retry-pushback-ms") ?? [];
  console.error(`${grpc.status[error.code]}: ${error.details}${after ? `; ask again after ${after} ms` : ""}`);
  process.exitCode = 1;
  client.close();
});
call.on("end", () => client.close());
