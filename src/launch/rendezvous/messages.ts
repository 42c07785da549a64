/** Messages between ranks and the rendezvous server (server.ts), as JSON. */

import { createHash } from "node:crypto";
import * as v from "valibot";
import { counted } from "../../system/counted.ts";

/** The first message of a rank: its identity, with a digest in place of the configuration. */
export const introductionSchema = v.strictObject({
	/** null: the launcher. */
	rank: v.nullable(v.pipe(v.number(), v.integer(), v.minValue(0))),
	worldSize: v.pipe(v.number(), v.integer(), v.minValue(1)),
	host: v.string(),
	/** Tells hosts of the same name apart. */
	machine: v.string(),
	pid: v.pipe(v.number(), v.integer()),
	/** Version and commit of the program. */
	version: v.string(),
	abi: v.number(),
	/** Native library: "cpu" or "cuda". */
	library: v.string(),
	/** digestOf(configuration): a configuration has hundreds of keys and nearly always equals the server's. */
	digest: v.pipe(v.string(), v.hexadecimal(), v.length(64)),
});
export type Introduction = v.InferOutput<typeof introductionSchema>;
const configurationSchema = v.record(v.string(), v.string());
export type Identity = Omit<Introduction, "digest"> & {
	/** Every configuration key as text. */
	readonly configuration: v.InferOutput<typeof configurationSchema>;
};

/** SHA-256, the same for equal configurations, whatever the order of their keys. */
export function digestOf(configuration: Identity["configuration"]): string {
	const entries = Object.entries(configuration).sort(([a], [b]) => (a < b ? -1 : 1));
	return createHash("sha256").update(JSON.stringify(entries)).digest("hex");
}

export function introductionOf({ configuration, ...about }: Identity): Introduction {
	return { ...about, digest: digestOf(configuration) };
}

/** "rank 2 (host box, process 4711)". */
export function describeIdentity({ rank, host, pid }: Pick<Identity, "rank" | "host" | "pid">): string {
	return `${rank === null ? "the launcher" : `rank ${rank}`} (host ${host}, process ${pid})`;
}

/** Configuration keys whose values differ, at most `most` of them. */
function differences(a: Identity, b: Identity, most = 3): string {
	if (a.configuration === b.configuration) return "";
	const keys = [...new Set([...Object.keys(a.configuration), ...Object.keys(b.configuration)])].filter(
		(key) => a.configuration[key] !== b.configuration[key],
	);
	const named = keys
		.slice(0, most)
		.map((key) => `${key} ${a.configuration[key] ?? "absent"} instead of ${b.configuration[key] ?? "absent"}`);
	return [...named, ...(keys.length > most ? [`${keys.length - most} more`] : [])].join(", ");
}

/** Why `member` cannot run with `reference`, in one sentence; null when it can. */
export function incompatibility(member: Identity, reference: Identity): string | null {
	const [name, other] = [describeIdentity(member), describeIdentity(reference)];
	if (member.worldSize !== reference.worldSize) {
		return `${name} expects ${counted(member.worldSize, "rank")}, ${other} expects ${reference.worldSize}.`;
	}
	if (member.version !== reference.version) {
		return `${name} runs mimo ${member.version}, ${other} runs ${reference.version}.`;
	}
	if (member.abi !== reference.abi) return `${name} has ABI version ${member.abi}, ${other} has ${reference.abi}.`;
	if (member.library !== reference.library) {
		return `${name} uses the ${member.library} library, ${other} the ${reference.library} library.`;
	}
	const differing = differences(member, reference);
	if (differing !== "") return `${name} has another configuration than ${other}: ${differing}.`;
	if (member.library === "cpu" && member.machine !== reference.machine) {
		return `${name} and ${other} are on different hosts: ranks of several hosts need NCCL (--device cuda), the CPU library joins ranks of one host.`;
	}
	return null;
}

const index = v.pipe(v.number(), v.integer(), v.minValue(0));
const port = v.pipe(v.number(), v.integer(), v.minValue(0), v.maxValue(65535));
const hostRequestSchema = v.strictObject({
	/** The host of each rank, run-length encoded (hosts.ts). */
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
