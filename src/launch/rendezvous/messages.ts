/** Messages between ranks and the rendezvous server (server.ts), as JSON. */
import * as v from "valibot";
import { configurationSchema } from "./identity.ts";

const index = v.pipe(v.number(), v.integer(), v.minValue(0));
const port = v.pipe(v.number(), v.integer(), v.minValue(0), v.maxValue(65535));
const leadSchema = v.strictObject({
	/** On which of the run's hosts each rank is (host-tree.ts). */
	placement: v.array(v.tuple([index, index, index])),
	/** Index of the host whose shared memory is to be created. */
	host: v.pipe(v.number(), v.integer(), v.minValue(1)),
	/** The relay of the host's parent in the tree of hosts. address null: the address at which this rank has reached rank 0. */
	parent: v.strictObject({ address: v.nullable(v.string()), port }),
	/** From which the relays' key is derived. */
	nonce: v.pipe(v.string(), v.hexadecimal(), v.length(64)),
});
export const answerSchema = v.union([
	v.strictObject({ run: v.string() }),
	v.strictObject({ lead: leadSchema }),
	v.strictObject({ tell: v.literal("configuration") }),
	v.strictObject({ refused: v.string() }),
]);
export type Answer = v.InferOutput<typeof answerSchema>;
/** The server's request to the first rank of another machine: create that machine's shared memory. */
export type Lead = v.InferOutput<typeof leadSchema>;
const partSchema = v.strictObject({
	run: v.string(),
	/** Port at which the relay listens for the hosts below it in the tree; 0: the host has none below it. */
	port,
});
/** The shared memory that a host has created for the run. */
export type Part = v.InferOutput<typeof partSchema>;
const ledSchema = v.union([partSchema, v.strictObject({ failed: v.string() })]);
export type Led = v.InferOutput<typeof ledSchema>;
/** The reply to "tell". */
export const toldSchema = v.strictObject({ configuration: configurationSchema });
export type Told = v.InferOutput<typeof toldSchema>;
const neighboursSchema = v.strictObject({
	neighbours: v.array(v.strictObject({ rank: index, pid: index, host: v.string() })),
});
/** A local rank has another identity, or has disconnected (`left`). */
const troubleSchema = v.strictObject({ trouble: v.string(), left: v.nullable(index) });
export const memberMessageSchema = v.union([ledSchema, neighboursSchema, troubleSchema]);
/** A message from the first rank of a machine about the other ranks of the machine. */
export type LocalRanksMessage = v.InferOutput<typeof neighboursSchema> | v.InferOutput<typeof troubleSchema>;
