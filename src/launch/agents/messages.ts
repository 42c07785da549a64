/**
 * Messages between the agents of a run over several hosts and its leader, as JSON over authenticated connections.
 *
 *     agent → leader   HELLO                 once, when it connects
 *     leader → agent   MEMBERS               the agents of the run, whenever they change
 *     leader → agent   BEGIN                 a generation: the ranks of this agent, and where they meet
 *     agent → leader   MET                   all its ranks have met the others
 *     agent → leader   FAILED                a rank of its own has ended, or its host's shared memory says why the run has failed
 *     leader → agent   STOP                  the generation is over: ranks end their step
 *     agent → leader   STOPPED               its ranks wait for the next generation, or have ended
 *     agent → leader   FINISHED              its ranks have done all their work
 *     agent → leader   LEAVES                it has not heard the leader for too long
 *     leader → agent   END                   the run is over
 *     leader → agent   REFUSED               the agent does not belong to the run
 *     either           BEAT                  once a second
 */
import * as v from "valibot";

const integer = v.pipe(v.number(), v.integer());
const index = v.pipe(integer, v.minValue(0));

const failureSchema = v.strictObject({
	/** null: no rank is to blame. */
	rank: v.nullable(index),
	reason: v.string(),
	/** The last step that the ranks of this agent have finished, counted in the training. */
	step: index,
	/** Whether the rank's program has ended by an error of its own. */
	own: v.boolean(),
	/** Exit code of the run, if it ends by this. */
	code: index,
	/** A signal to the agent: the run ends. */
	interrupted: v.boolean(),
});
/** Why a generation has ended, as an agent sees it. */
export type AgentFailure = v.InferOutput<typeof failureSchema>;

const helloSchema = v.strictObject({
	/** Counts the agents that the engine has started. */
	agent: index,
	/** The engine's name of its host, which several agents may share. */
	node: v.string(),
	/** The host's own name. */
	host: v.string(),
	/** Place of its first rank among those of the host. */
	localRank: index,
	/** Ranks of this agent. */
	seats: v.pipe(integer, v.minValue(1)),
	/** Numeric address at which others reach it; "": that from which it comes. */
	address: v.string(),
	/** Where it listens, to lead the run if need be. */
	port: index,
	/** Where its first rank may let the others meet. */
	meeting: index,
	/** The generation that its ranks are in, and the first of them; null: it has none. */
	generation: index,
	first: v.nullable(index),
	/** Digest of the program and its configuration. */
	program: v.string(),
});
export type Hello = v.InferOutput<typeof helloSchema>;

const generationOnly = { generation: index };
const stoppedSchema = v.strictObject({ ...generationOnly, meeting: index, failure: v.nullable(failureSchema) });
export const agentMessageSchema = v.union([
	v.strictObject({ hello: helloSchema }),
	v.strictObject({ met: v.strictObject(generationOnly) }),
	v.strictObject({ failed: v.strictObject({ ...generationOnly, failure: failureSchema }) }),
	v.strictObject({ stopped: stoppedSchema }),
	v.strictObject({ finished: v.strictObject({ ...generationOnly, code: index }) }),
	v.strictObject({ leaves: v.literal(true) }),
	v.strictObject({ beat: v.literal(true) }),
]);
export type AgentMessage = v.InferOutput<typeof agentMessageSchema>;

/** An agent's address for the time when it leads. */
const memberSchema = v.strictObject({ agent: index, address: v.string(), port: index });
export type Member = v.InferOutput<typeof memberSchema>;

/** A new leader's knowledge of the restarts so far. */
const historySchema = v.strictObject({ ages: v.array(v.number()), stepped: v.boolean() });
export type History = v.InferOutput<typeof historySchema>;

const beginSchema = v.strictObject({
	...generationOnly,
	/** First rank of this agent. */
	first: index,
	/** Index of the run's layout (Layout in leader.ts). */
	layout: index,
	/** Where the ranks meet. address null: the host of the leader. */
	meeting: v.strictObject({ address: v.nullable(v.string()), port: index }),
});

/** A generation as an agent has to know it. */
export type Begin = v.InferOutput<typeof beginSchema>;

const membersSchema = v.strictObject({
	...generationOnly,
	layout: index,
	/** All agents, in the order in which they lead. */
	members: v.array(memberSchema),
	history: historySchema,
});
/** The state with which an agent leads. */
export type Members = v.InferOutput<typeof membersSchema>;

export const leaderMessageSchema = v.union([
	v.strictObject({ members: membersSchema }),
	v.strictObject({ begin: beginSchema }),
	v.strictObject({ stop: v.strictObject({ ...generationOnly, rank: v.nullable(index), reason: v.string() }) }),
	v.strictObject({ end: v.strictObject({ code: index }) }),
	v.strictObject({ refused: v.string() }),
	v.strictObject({ beat: v.literal(true) }),
]);
export type LeaderMessage = v.InferOutput<typeof leaderMessageSchema>;
