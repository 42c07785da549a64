/**
 * The leader of a run over several hosts: one agent decides, from what all tell it, which host has which ranks in each generation,
 * and when a failure ends the run. It knows no sockets: agents are added, heard and lost.
 */
import { counted } from "../../system/counted.ts";
import { exitCodes } from "../../system/exit-codes.ts";
import { type RestartOptions, RestartPolicy } from "../restart-policy.ts";
import type { AgentFailure, AgentMessage, Hello, History, LeaderMessage } from "./messages.ts";

/** A form of the run: its ranks, which fill whole hosts, and the flags by which its configuration differs from the given one. */
export interface Layout {
	readonly ranks: number;
	readonly flags: readonly string[];
}

export interface LeaderOptions {
	/** Agents that the engine has started. */
	readonly agents: number;
	/** The run's forms, with fewer and fewer ranks: the first that the hosts suffice for is taken. */
	readonly layouts: readonly Layout[];
	/** Ranks of a host. */
	readonly perHost: number;
	readonly restarts: RestartOptions;
	/** For all agents to come. */
	readonly timeoutMinutes: number;
	readonly log: (line: string) => void;
}

/** Where a new leader goes on: the generation, the agents that were in it, and the restarts so far. */
export interface Succession {
	readonly generation: number;
	readonly layout: number;
	/** Numbers of the agents that may be alive, without this one hearing them either. */
	readonly agents: readonly number[];
	readonly former: number;
	readonly history: History;
	readonly reason: string;
}

/** An agent as the leader sees it. */
interface Follower {
	readonly hello: Hello;
	/** First of its ranks; null: it is spare. */
	first: number | null;
	/** A port at which its ranks may meet next. */
	meeting: number;
	readonly send: (message: LeaderMessage) => void;
}

/** Milliseconds for the agents of a lost leader to come to the next one. */
const successionTime = 8000;
/** Milliseconds after which a run with enough hosts begins without those that have not come. */
const longestGathering = 60_000;

export class Leader {
	readonly #followers = new Map<number, Follower>();
	readonly #policy: RestartPolicy;
	#phase: "gathering" | "running" | "stopping" | "over" = "gathering";
	#generation: number;
	/** Agents of the generation that have not ended; more than half of them must be here. */
	#agents: readonly number[];
	readonly #stopping = new Set<number>();
	readonly #met = new Set<number>();
	readonly #finished = new Map<number, number>();
	#failure: AgentFailure | null = null;
	#failedAt = 0;
	#layout: number;
	/** Whether the generation is stopped for more ranks, not for a failure, and whether the one before was. */
	#grows = false;
	#grown = false;
	/** Hosts of which a rank had a wrong result, and how often. */
	readonly #suspects = new Map<string, number>();
	/** Whether another agent led the generation. */
	#takesOver: boolean;
	/** Ranks that a restart gives new hosts. */
	#moved: string[] = [];
	#timer: ReturnType<typeof setTimeout>;

	constructor(
		private readonly options: LeaderOptions,
		private readonly own: number,
		succession: Succession | null,
	) {
		this.#policy = new RestartPolicy(options.restarts);
		this.#takesOver = succession !== null;
		this.#layout = succession?.layout ?? 0;
		this.#generation = succession?.generation ?? -1;
		this.#agents = succession?.agents ?? Array.from({ length: options.agents }, (_, agent) => agent);
		if (succession !== null) {
			this.#policy.take(succession.history, performance.now());
			this.#phase = "stopping";
			this.#failedAt = performance.now();
			this.#failure = lost(null, succession.reason);
			for (const agent of succession.agents) if (agent !== succession.former) this.#stopping.add(agent);
		}
		this.#timer = setTimeout(() => this.#waited(), succession === null ? longestGathering : successionTime);
	}

	get over(): boolean {
		return this.#phase === "over";
	}

	/** An agent has come. Returns why it is refused, or null. */
	add(hello: Hello, send: Follower["send"]): string | null {
		const { agent, program, first, meeting, host } = hello;
		const reference = this.#followers.get(this.own)?.hello.program ?? program;
		if (program !== reference)
			return `The agent of host ${host} has another program or configuration than the leader's.`;
		if (this.#followers.has(agent)) return `There are two agents ${agent}.`;
		const belongs = hello.generation === this.#generation && this.#phase === "stopping";
		this.#followers.set(agent, { hello, first: belongs ? first : null, meeting, send });
		if (this.#phase === "running") {
			this.options.log(`Host ${host} has joined and is spare.`);
			this.#tellMembers();
			if (this.#bestLayout() < this.#layout) {
				this.#grows = true;
				this.#fail(lost(null, `host ${host} has come, and the run takes its ranks in`));
			}
		}
		if (this.#phase === "gathering") this.#beginFirst(this.#followers.size === this.options.agents);
		if (belongs && this.#stopping.has(agent)) {
			if (first === null) this.#stopping.delete(agent);
			else send({ stop: { generation: this.#generation, rank: null, reason: this.#failure!.reason } });
			this.#goOn();
		}
		return null;
	}

	hear(agent: number, message: AgentMessage): void {
		const follower = this.#followers.get(agent);
		if (follower === undefined || this.#phase === "over") return;
		if ("failed" in message && message.failed.generation === this.#generation) this.#fail(message.failed.failure);
		if ("stopped" in message && message.stopped.generation === this.#generation) {
			const { meeting, failure } = message.stopped;
			follower.meeting = meeting;
			// The agent of the rank to blame knows how its process has ended.
			const blamed = failure !== null && (failure.interrupted || (failure.own && failure.rank === this.#failure?.rank));
			if (blamed || (failure !== null && this.#failure?.rank === null && failure.own)) this.#failure = failure;
			this.#stopping.delete(agent);
			this.#goOn();
		}
		if ("met" in message && message.met.generation === this.#generation) {
			this.#met.add(agent);
			if (this.#generation > 0 && this.#working().every((one) => this.#met.has(one.hello.agent))) this.#tellOfRestart();
		}
		if ("finished" in message && message.finished.generation === this.#generation) {
			this.#finished.set(agent, message.finished.code);
			if (this.#phase === "running" && this.#working().every((one) => this.#finished.has(one.hello.agent)))
				this.#end(Math.max(...this.#finished.values()), null);
		}
	}

	/** An agent is lost. `ended`: its process has ended; else it may live and not be heard. */
	lose(agent: number, why: string, ended: boolean): void {
		const follower = this.#followers.get(agent);
		this.#followers.delete(agent);
		if (ended) this.#agents = this.#agents.filter((one) => one !== agent);
		if (follower === undefined || this.#phase === "over" || this.#phase === "gathering") return;
		const { host } = follower.hello;
		if (follower.first === null) this.options.log(`The spare host ${host} is lost: ${why}.`);
		else if (this.#phase === "running") this.#fail(lost(follower.first, `its host ${host} is lost: ${why}`));
		this.#stopping.delete(agent);
		this.#goOn();
	}

	/** Agents that have ranks, in the order of these. */
	#working(): Follower[] {
		return [...this.#followers.values()].filter(({ first }) => first !== null).sort((a, b) => a.first! - b.first!);
	}

	#waited(): void {
		if (this.#phase === "gathering") {
			this.#beginFirst(true);
			const { timeoutMinutes, agents } = this.options;
			const reason = `Only ${this.#followers.size} of ${counted(agents, "agent")} have come within ${counted(timeoutMinutes, "minute")}.`;
			const left = timeoutMinutes * 60_000 - longestGathering;
			if (this.#generation < 0) this.#timer = setTimeout(() => this.#end(exitCodes.failure, reason), left);
		}
		if (this.#phase !== "stopping") return;
		// The time of a succession is over.
		for (const agent of this.#stopping) if (!this.#followers.has(agent)) this.#stopping.delete(agent);
		this.#goOn();
	}

	#beginFirst(all: boolean): void {
		if (!all || !this.#assign()) return;
		this.#begin();
	}

	#fail(failure: AgentFailure): void {
		if (this.#phase !== "running") return;
		this.#phase = "stopping";
		this.#failure = failure;
		this.#failedAt = performance.now();
		const { rank, reason } = failure;
		for (const { hello, send } of this.#working()) {
			this.#stopping.add(hello.agent);
			send({ stop: { generation: this.#generation, rank, reason } });
		}
	}

	/** Begins the next generation when all agents have stopped, or ends the run. */
	#goOn(): void {
		if (this.#phase !== "stopping" || this.#stopping.size > 0) return;
		const end = this.#endOfRun(this.#failure!);
		if (end === null) this.#begin();
		else this.#end(end.code, end.reason);
	}

	/** Why the run ends with its failure, and with which code; null: it goes on, and every rank has a host. */
	#endOfRun(failure: AgentFailure): { readonly code: number; readonly reason: string } | null {
		if (failure.interrupted) return failure;
		const left = this.#agents.filter((agent) => this.#followers.has(agent)).length;
		// Of two halves that do not hear each other one goes on: that of the leader.
		if (2 * left + (this.#takesOver ? 0 : 1) <= this.#agents.length) {
			const reason = `The run is not restarted: ${left} of ${counted(this.#agents.length, "agent")} are left, and the others may go on by themselves; start it again.`;
			return { code: exitCodes.runAgain, reason };
		}
		if (failure.code === exitCodes.wrongResult) this.#suspect(failure.rank);
		const refusal = this.#grows ? null : this.#policy.refusal(failure, performance.now());
		if (refusal !== null) return { code: failure.code, reason: refusal };
		if (this.#assign()) return null;
		return { code: exitCodes.failure, reason: "The run is not restarted: a host is lost, and no other is spare." };
	}

	/** A rank had a wrong result: its host gives its ranks to a spare one, and the second time has none any more. */
	#suspect(rank: number | null): void {
		const host = this.#working().find(({ first, hello }) => rank! >= first! && rank! < first! + hello.seats)?.hello;
		if (host) this.#suspects.set(host.node, (this.#suspects.get(host.node) ?? 0) + 1);
	}

	/** Hosts all of whose agents are there, in the order of these, and those last that had a wrong result. */
	#wholeHosts(): Follower[][] {
		const wrong = (of: readonly Follower[]) => this.#suspects.get(of[0]!.hello.node) ?? 0;
		const followers = [...this.#followers.values()].sort((a, b) => a.hello.agent - b.hello.agent);
		const seats = (of: readonly Follower[]) => of.reduce((sum, { hello }) => sum + hello.seats, 0);
		return [...Map.groupBy(followers, ({ hello }) => hello.node).values()]
			.filter((of) => seats(of) === this.options.perHost && wrong(of) < 2)
			.sort((a, b) => wrong(a) - wrong(b));
	}

	/** Index of the layout with the most ranks that hosts suffice for; the number of layouts: none. */
	#bestLayout(): number {
		const { layouts, perHost } = this.options;
		const seats = this.#wholeHosts().length * perHost;
		const best = layouts.findIndex(({ ranks }) => ranks <= seats);
		return best < 0 ? layouts.length : best;
	}

	/** Gives every block of a host's ranks a host whose agents are all there. Returns false if hosts are wanting. */
	#assign(): boolean {
		const { layouts, perHost } = this.options;
		const layout = this.#bestLayout();
		if (layout === layouts.length) return false;
		const { ranks } = layouts[layout]!;
		const blocks = new Map<number, Follower[]>();
		/** Blocks of hosts that had a wrong result: a spare host takes them if there is one. */
		const suspected = new Map<number, Follower[]>();
		const free: Follower[][] = [];
		for (const of of this.#wholeHosts()) {
			const firsts = of.map(({ first, hello }) => (first === null ? null : first - hello.localRank));
			const [block] = firsts;
			const keeps = block != null && block < ranks && firsts.every((one) => one === block);
			if (keeps) (this.#suspects.has(of[0]!.hello.node) ? suspected : blocks).set(block, of);
			else free.push(of);
		}
		// Hosts come in the order of their wrong results: behind the trusted ones are those that have had one themselves.
		const trusted = free.filter(([one]) => !this.#suspects.has(one!.hello.node));
		const rest = free.filter((of) => !trusted.includes(of));
		this.#moved = layout === this.#layout ? [] : [`the run has ${ranks} of ${layouts[0]!.ranks} ranks`];
		this.#layout = layout;
		const before = new Map([...this.#followers.values()].map((follower) => [follower, follower.first]));
		for (const follower of this.#followers.values()) follower.first = null;
		for (let block = 0; block < ranks; block += perHost) {
			const own = suspected.get(block);
			const of = blocks.get(block) ?? trusted.shift() ?? own ?? rest.shift();
			if (of === undefined) return false;
			// Its copies of its ranks' state are of no use to others.
			if (own !== undefined && own !== of) rest.push(own);
			for (const follower of of) follower.first = block + follower.hello.localRank;
			if (of.some((follower) => before.get(follower) !== follower.first))
				this.#moved.push(`host ${of[0]!.hello.host} takes ranks ${block} to ${block + perHost - 1}`);
		}
		return true;
	}

	#begin(): void {
		clearTimeout(this.#timer);
		this.#generation++;
		this.#phase = "running";
		this.#grown = this.#grows;
		this.#grows = false;
		this.#takesOver = false;
		this.#met.clear();
		this.#finished.clear();
		this.#stopping.clear();
		this.#tellMembers();
		const [zero] = this.#working();
		const address = zero!.hello.agent === this.own ? null : zero!.hello.address;
		const about = { generation: this.#generation, layout: this.#layout, meeting: { address, port: zero!.meeting } };
		for (const { first, send } of this.#working()) send({ begin: { ...about, first: first! } });
	}

	#tellMembers(): void {
		this.#agents = [...this.#followers.keys()].sort((a, b) => a - b);
		const members = this.#agents.map((agent) => {
			const { address, port } = this.#followers.get(agent)!.hello;
			return { agent, address, port };
		});
		const history = this.#policy.history(performance.now());
		for (const { send } of this.#followers.values()) {
			send({ members: { generation: this.#generation, layout: this.#layout, members, history } });
		}
	}

	#tellOfRestart(): void {
		const seconds = ((performance.now() - this.#failedAt) / 1000).toFixed(2);
		const moved = this.#moved.length === 0 ? "every host keeps its ranks" : this.#moved.join(", ");
		const why = this.#grown ? "More hosts" : this.#policy.count();
		const since = this.#grown ? "one has come" : "the failure";
		this.options.log(`${why}: ${moved}; all ranks have met ${seconds} s after ${since}.`);
	}

	/** `reason`: a sentence; null: all is done. */
	#end(code: number, reason: string | null): void {
		clearTimeout(this.#timer);
		this.#phase = "over";
		if (reason !== null) this.options.log(reason);
		for (const { send } of this.#followers.values()) send({ end: { code } });
	}
}

function lost(rank: number | null, reason: string): AgentFailure {
	return { rank, reason, step: 0, own: false, code: exitCodes.failure, interrupted: false };
}
