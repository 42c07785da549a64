/** Messages between ranks that meet and their host (server.ts), as JSON. */
import * as v from "valibot";
import { configurationSchema } from "./identity.ts";

const index = v.pipe(v.number(), v.integer(), v.minValue(0));
const port = v.pipe(v.number(), v.integer(), v.minValue(0), v.maxValue(65535));
const leadSchema = v.strictObject({
	/** On which of the run's hosts each rank is (host-tree.ts). */
	placement: v.array(v.tuple([index, index, index])),
	/** The host whose shared memory is wanted. */
	host: v.pipe(v.number(), v.integer(), v.minValue(1)),
	/** The relay of the host above it; address null: that of rank 0, where it has been met. */
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
/** The request to the first rank of another machine. */
export type Lead = v.InferOutput<typeof leadSchema>;
const partSchema = v.strictObject({
	run: v.string(),
	/** Where the relay listens for hosts below; 0: there are none. */
	port,
});
/** A host's part of the run. */
export type Part = v.InferOutput<typeof partSchema>;
const ledSchema = v.union([partSchema, v.strictObject({ failed: v.string() })]);
export type Led = v.InferOutput<typeof ledSchema>;
/** The answer to "tell". */
export const toldSchema = v.strictObject({ configuration: configurationSchema });
export type Told = v.InferOutput<typeof toldSchema>;
const neighboursSchema = v.strictObject({
	neighbours: v.array(v.strictObject({ rank: index, pid: index, host: v.string() })),
});
/** A neighbour does not fit, or has left. */
const troubleSchema = v.strictObject({ trouble: v.string(), left: v.nullable(index) });
export const wordSchema = v.union([ledSchema, neighboursSchema, troubleSchema]);
/** Message from the first rank of a machine about the others there. */
export type Word = v.InferOutput<typeof neighboursSchema> | v.InferOutput<typeof troubleSchema>;
