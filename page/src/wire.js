// gRPC-Web over fetch: https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-WEB.md
import { create, fromBinary, toBinary } from "@bufbuild/protobuf";

const CONTENT_TYPE = "application/grpc-web+proto";
const TRAILERS = 0x80;
const PREFIX_BYTES = 5;
const CODES = [
  "OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS",
  "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE", "UNIMPLEMENTED",
  "INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED",
];

/** A call that failed: the status code by name, and the server's own text. */
export class CallError extends Error {
  constructor(code, text) {
    super(text || code);
    this.code = code;
  }
}

const BROKEN = "The connection broke before the reply was complete.";

/** What the browser throws while a reply is read: the caller's own end of the call, or a broken connection. */
function interrupted(error) {
  throw error.name === "AbortError" ? error : new CallError("UNAVAILABLE", BROKEN);
}

function framed(messages) {
  const length = messages.reduce((sum, message) => sum + PREFIX_BYTES + message.length, 0);
  const body = new Uint8Array(length);
  const view = new DataView(body.buffer);
  let at = 0;
  for (const message of messages) {
    view.setUint32(at + 1, message.length);
    body.set(message, at + PREFIX_BYTES);
    at += PREFIX_BYTES + message.length;
  }
  return body;
}

async function* frames(body) {
  const reader = body.getReader();
  let parts = [];
  let held = 0;
  const take = (count) => {
    const taken = new Uint8Array(count);
    let filled = 0;
    while (filled < count) {
      const part = parts[0];
      const used = Math.min(part.length, count - filled);
      taken.set(part.subarray(0, used), filled);
      filled += used;
      if (used === part.length) parts.shift();
      else parts[0] = part.subarray(used);
    }
    held -= count;
    return taken;
  };
  const fill = async (count) => {
    while (held < count) {
      const { done, value } = await reader.read().catch(interrupted);
      if (done) return false;
      parts.push(value);
      held += value.length;
    }
    return true;
  };
  try {
    while (await fill(PREFIX_BYTES)) {
      const prefix = take(PREFIX_BYTES);
      const length = new DataView(prefix.buffer).getUint32(1);
      if (!(await fill(length))) break;
      yield { flags: prefix[0], content: take(length) };
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function check(trailers) {
  const fields = new Map(
    new TextDecoder().decode(trailers).trim().split("\r\n").map((line) => {
      const [key, ...value] = line.split(":");
      return [key.toLowerCase(), value.join(":").trim()];
    }),
  );
  const code = Number(fields.get("grpc-status"));
  if (code !== 0) throw new CallError(CODES[code] ?? "UNKNOWN", decodeURIComponent(fields.get("grpc-message") ?? ""));
}

/**
 * Makes a call and yields the messages of its reply.
 * @param method one of a generated service's `method`
 * @param requests messages, or plain objects of their fields
 * @param options `token` of the caller, and `signal` that ends the call
 */
export async function* stream(method, requests, { token, signal } = {}) {
  const headers = { "content-type": CONTENT_TYPE };
  if (token) headers.authorization = `Bearer ${token}`;
  let reply;
  try {
    reply = await fetch(`/${method.parent.typeName}/${method.name}`, {
      method: "POST", headers, signal, credentials: "omit", cache: "no-store",
      body: framed(requests.map((request) => toBinary(method.input, create(method.input, request)))),
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new CallError("UNAVAILABLE", "The page's server does not answer. Is it still running?");
  }
  if (!reply.ok) throw new CallError(`HTTP ${reply.status}`, (await reply.text().catch(interrupted)).trim());
  let isEnded = false;
  for await (const { flags, content } of frames(reply.body)) {
    if (flags & TRAILERS) {
      check(content);
      isEnded = true;
    } else yield fromBinary(method.output, content);
  }
  if (!isEnded) throw new CallError("UNAVAILABLE", BROKEN);
}

/** Makes a call with one message each way. */
export async function call(method, request = {}, options = {}) {
  let reply;
  for await (const message of stream(method, [request], options)) reply = message;
  return reply;
}
