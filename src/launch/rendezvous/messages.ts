/** Messages between ranks and the rendezvous server (server.ts), as JSON. */
import * as v from "valibot";
import { configurationSchema } from "./identity.ts";

const index = v.pipe(v.number(), v.integer(), v.minValue(0));
const port = v.pipe(v.number(), v.integer(), v.minValue(0), v.maxValue(65535));
const hostRequestSchema = v.strictObject({
	/** The host of each rank, run-length encoded (host-tree.ts). */
	placement: v.array(v.tuple([index, index, index])),
	/** Index of the host whose shared memory is to be created. */
	host: v.pipe(v.number(), v.integer(), v.minValue(1)),
	/** The relay of the host's parent in the tree of hosts. address null: the address at which this rank has connected to rank 0. */
	parent: v.strictObject({ address: v.nullable(v.string()), port }),
	/** The relays' key is derived from it. */
	nonce: v.pipe(v.string(), v.hexadecimal(), v.length(64)),
});
export const serverMessageSchema = v.union([
	v.strictObject({ run: v.string() }),
	v.strictObject({ createHostMemory: hostRequestSchema }),
	v.strictObject({ request: v.literal("configuration") }),
	v.strictObject({ refused: v.string() }),
]);
export type ServerMessage = v.InferOutput<typeof serverMessageSchema>;
/** The server's request to the first rank of another machine: create that machine's shared memory. */
export type HostRequest = v.InferOutput<typeof hostRequestSchema>;
const hostMemorySchema = v.strictObject({
	run: v.string(),
	/** Port at which the relay listens for the hosts below it in the tree; 0: the host has none below it. */
	port,
});
/** The shared memory that a host has created for the run. */
export type HostMemory = v.InferOutput<typeof hostMemorySchema>;
const hostReplySchema = v.union([hostMemorySchema, v.strictObject({ failed: v.string() })]);
export type HostReply = v.InferOutput<typeof hostReplySchema>;
/** The reply to { request: "configuration" }. */
export const configurationReplySchema = v.strictObject({ configuration: configurationSchema });
export type ConfigurationReply = v.InferOutput<typeof configurationReplySchema>;
const localRanksSchema = v.strictObject({
	localRanks: v.array(v.strictObject({ rank: index, pid: index, host: v.string() })),
});
/** A local rank is incompatible, or has disconnected. */
const localFailureSchema = v.strictObject({ failure: v.string(), disconnected: v.nullable(index) });
export const rankMessageSchema = v.union([hostReplySchema, localRanksSchema, localFailureSchema]);
/** A message from the first rank of a machine about the other ranks of the machine. */
export type LocalRanksMessage = v.InferOutput<typeof localRanksSchema> | v.InferOutput<typeof localFailureSchema>;
