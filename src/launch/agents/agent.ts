/**
 * An agent of a run over several hosts that goes on after failures: the process that the engine has started (one a host, or one in
 * the place of each rank), which starts its ranks and outlives them. The first agent leads (leader.ts), at the address that the
 * engine gives; where it is lost the next one takes its place (docs/decisions/restarts.md).
 */
import { createHash } from "node:crypto";
import { isIP } from "node:net";
import { hostname } from "node:os";
import * as v from "valibot";
import { UserError } from "../../system/errors.ts";
import { signalExit } from "../../system/exit-codes.ts";
import { type AuthenticatedConnection, AuthenticatedListener } from "../rendezvous/authenticated-connection.ts";
import { connectAuthenticated } from "../rendezvous/client.ts";
import { rendezvousAddress } from "../rendezvous/line-connection.ts";
import { freePort, HostRanks, type HostRanksOptions } from "./host-ranks.ts";
import { Leader, type LeaderOptions, type Succession } from "./leader.ts";
import {
	type AgentFailure,
	type AgentMessage,
	agentMessageSchema,
	type Hello,
	type LeaderMessage,
	leaderMessageSchema,
	type Member,
	type Members,
} from "./messages.ts";
import type { AgentPlace } from "./place.ts";

export interface AgentOptions
	extends Pick<HostRanksOptions, "command" | "library" | "layouts">,
		Pick<LeaderOptions, "restarts" | "timeoutMinutes" | "log"> {
	readonly place: AgentPlace;
	/** Text that is equal for agents of one program and configuration. */
	readonly program: string;
}

/** Milliseconds between beats, and of silence after which a connection counts as lost. */
const beats = { interval: 1000, silence: 5000 };
/** Milliseconds to find the next leader. */
const searchTime = 10_000;
const forwardedSignals = ["SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1"] as const;

/** Runs this host's ranks until the run is over. Returns its exit code. */
export async function superviseRanks(options: AgentOptions): Promise<number> {
	using agent = new Agent(options);
	return await agent.run();
}

class Agent implements Disposable {
	readonly #ranks: HostRanks;
	/** null: another agent leads. */
	#leader: Leader | null = null;
	/** To the leader, where that is another agent. */
	#connection: AuthenticatedConnection | null = null;
	#listener: AuthenticatedListener | null = null;
	#address: string;
	/** Connections of agents that came before this one leads. */
	#early: AuthenticatedConnection[] = [];
	#members: Members | null = null;
	/** Whether the leader that this agent follows has said anything, and whether it is lost because its process has ended. */
	#answered = false;
	#ended = false;
	/** When this process itself last stood still for so long that others may have missed it. */
	#stalledAt = Number.NEGATIVE_INFINITY;
	#beaten = performance.now();
	#interrupted: NodeJS.Signals | null = null;
	readonly #over = Promise.withResolvers<number>();
	readonly #beat: ReturnType<typeof setInterval>;
	readonly #led = new Set<AuthenticatedConnection>();

	constructor(private readonly options: AgentOptions) {
		const { place, command, library, layouts } = options;
		const { seats, localRank, localSize, secret, node } = place;
		this.#address = place.address;
		const tell = (message: AgentMessage) => this.#tell(message);
		this.#ranks = new HostRanks({
			...{ command, library, layouts, seats, localRank, localSize, secret, node },
			met: () => tell({ met: { generation: this.#ranks.generation } }),
			failed: (failure) => tell({ failed: { generation: this.#ranks.generation, failure } }),
			finished: (code) => tell({ finished: { generation: this.#ranks.generation, code } }),
		});
		this.#beat = setInterval(() => {
			const now = performance.now();
			if (now - this.#beaten > beats.silence - 2 * beats.interval) this.#stalledAt = now;
			this.#beaten = now;
			this.#connection?.send({ beat: true });
			for (const connection of this.#led) connection.send({ beat: true });
		}, beats.interval);
	}

	async run(): Promise<number> {
		const { place, timeoutMinutes } = this.options;
		const stopListening = this.#listenToSignals();
		try {
			const numeric = await rendezvousAddress(
				{ ...place, rank: place.agent, worldSize: place.agents, launcher: null },
				timeoutMinutes * 60_000,
			);
			if (place.agent === 0) {
				// Ranks of this host find out by themselves that the name hides its address.
				if (isIP(numeric) !== 0 && numeric !== "0.0.0.0") this.#address = numeric;
				await this.#listen(numeric, place.port);
				await this.#lead(null);
			} else void this.#followLeaders(numeric, timeoutMinutes * 60_000).catch(this.#over.reject);
			const code = await this.#over.promise;
			await this.#ranks.end();
			return code;
		} finally {
			stopListening();
		}
	}

	[Symbol.dispose](): void {
		clearInterval(this.#beat);
		this.#ranks[Symbol.dispose]();
		this.#listener?.[Symbol.dispose]();
		for (const connection of [...this.#led, ...this.#early]) connection[Symbol.dispose]();
		this.#connection?.[Symbol.dispose]();
	}

	get #stalled(): boolean {
		return performance.now() - this.#stalledAt < 2 * beats.silence;
	}

	async #hello(address: string): Promise<Hello> {
		const { agent, node, localRank, seats } = this.options.place;
		const program = createHash("sha256").update(this.options.program).digest("hex");
		const { generation = 0 } = this.#members ?? {};
		const first = generation === this.#ranks.generation ? this.#ranks.first : null;
		const port = this.#listener?.port ?? 0;
		const meeting = await freePort();
		return { agent, node, host: hostname(), localRank, seats, address, port, meeting, generation, first, program };
	}

	/** Sends a message to the leader, which may be this process. */
	#tell(message: AgentMessage): void {
		if (this.#leader !== null) queueMicrotask(() => this.#leader!.hear(this.options.place.agent, message));
		else this.#connection?.send(message);
	}

	#take(message: LeaderMessage): void {
		if ("members" in message) this.#members = message.members;
		else if ("begin" in message) {
			this.#ranks.begin(message.begin, message.begin.meeting.address ?? this.#address);
		} else if ("stop" in message) {
			const { generation, rank, reason } = message.stop;
			if (generation === this.#ranks.generation) void this.#stop(generation, rank, reason);
		} else if ("end" in message) this.#over.resolve(message.end.code);
		else if ("refused" in message) throw new UserError(message.refused);
	}

	async #stop(generation: number, rank: number | null, reason: string): Promise<void> {
		const seen = await this.#ranks.stop(rank, reason);
		const meeting = await freePort();
		this.#tell({ stopped: { generation, meeting, failure: this.#interruption() ?? seen } });
	}

	#interruption(): AgentFailure | null {
		const signal = this.#interrupted;
		if (signal === null) return null;
		const reason = `The run was interrupted by ${signal}.`;
		return { rank: null, reason, step: 0, own: false, code: signalExit(signal), interrupted: true };
	}

	// As a follower.

	/** Follows the first agent, and those that lead after it, until the run is over or this agent leads. */
	async #followLeaders(first: string, milliseconds: number): Promise<void> {
		const { agent: own, port } = this.options.place;
		let lost = await this.#follow({ agent: 0, address: first, port }, milliseconds);
		let former = 0;
		let ended = this.#ended ? former : null;
		while (lost !== null) {
			const known = this.#members;
			if (known === null) throw new UserError(`The run's first host is lost before all have met: ${lost}.`);
			const reason = `the agent that led the run is lost: ${lost}`;
			await this.#ranks.stop(null, reason);
			for (const member of known.members.filter(({ agent }) => agent !== former)) {
				if (member.agent === own) {
					this.#address = member.address;
					const agents = known.members.map(({ agent }) => agent).filter((agent) => agent !== ended);
					return await this.#lead({ ...known, agents, former, reason });
				}
				this.#answered = false;
				// An agent that cannot be reached is lost as well; one that does not answer does not lead.
				lost = await this.#follow(member, searchTime).catch((error: Error) => error.message);
				if (lost === null) return;
				former = member.agent;
				ended = this.#ended ? former : null;
				if (this.#answered) break;
			}
		}
	}

	/** Follows a leader until the run is over, null, or the leader is lost: why, as a part of a sentence. */
	async #follow({ address: host, port }: Member, milliseconds: number): Promise<string | null> {
		const { secret } = this.options.place;
		using connection = await connectAuthenticated({ host, port }, secret, performance.now() + milliseconds);
		this.#connection = connection;
		this.#address = connection.address;
		if (this.#listener === null) await this.#listen(connection.localAddress, 0);
		connection.send({ hello: await this.#hello(connection.localAddress) });
		for (;;) {
			const received = await connection.receive(beats.silence);
			const message = v.safeParse(leaderMessageSchema, received);
			if (message.success) {
				this.#answered = true;
				this.#take(message.output);
				if ("end" in message.output) return null;
			} else if (received === undefined) {
				this.#connection = null;
				this.#ended = connection.closed && !this.#stalled;
				connection.send({ leaves: true });
				return endOf(connection.closed);
			}
		}
	}

	// As the leader.

	async #listen(host: string, port: number): Promise<void> {
		const { secret, agents } = this.options.place;
		const admit = (connection: AuthenticatedConnection) => {
			if (this.#leader === null) this.#early.push(connection);
			else void this.#serve(connection);
		};
		try {
			const endpoint = { host, port };
			this.#listener = await AuthenticatedListener.open({ endpoint, secret, expected: agents, admit });
		} catch (error) {
			throw new UserError(`The hosts cannot meet at ${host}:${port} (${(error as NodeJS.ErrnoException).code}).`);
		}
	}

	async #lead(succession: Succession | null): Promise<void> {
		const { place, layouts, restarts, timeoutMinutes, log } = this.options;
		const { agent, agents, localSize } = place;
		const leader = new Leader(
			{ agents, layouts, perHost: localSize, restarts, timeoutMinutes, log },
			agent,
			succession,
		);
		this.#leader = leader;
		if (succession !== null) log(`Agent ${agent} leads the run from now on: ${succession.reason}.`);
		leader.add(await this.#hello(this.#address), (message) => queueMicrotask(() => this.#take(message)));
		for (const connection of this.#early.splice(0)) void this.#serve(connection);
	}

	/** Hears an agent until it is lost. */
	async #serve(connection: AuthenticatedConnection): Promise<void> {
		let agent: number | null = null;
		let left = false;
		const leader = this.#leader!;
		this.#led.add(connection);
		for (;;) {
			const received = await connection.receive(beats.silence);
			if (received === undefined) break;
			const message = v.safeParse(agentMessageSchema, received);
			if (!message.success) continue;
			if ("leaves" in message.output) left = true;
			if (!("hello" in message.output)) {
				if (agent !== null) leader.hear(agent, message.output);
				continue;
			}
			const hello = message.output.hello;
			const refusal = leader.add(hello, (answer) => connection.send(answer));
			if (refusal === null) agent = hello.agent;
			else connection.send({ refused: refusal });
		}
		this.#led.delete(connection);
		const { closed } = connection;
		connection[Symbol.dispose]();
		if (agent !== null) leader.lose(agent, endOf(closed), closed && !left && !this.#stalled);
	}

	/** Forwards signals to the ranks; the same one again ends the run. Returns a function that stops forwarding. */
	#listenToSignals(): () => void {
		const listeners = forwardedSignals.map((signal) => {
			const listener = () => {
				const repeated = this.#interrupted === signal;
				this.#interrupted = signal;
				this.#ranks.signal(repeated ? "SIGKILL" : signal);
			};
			process.on(signal, listener);
			return { signal, listener };
		});
		return () => {
			for (const { signal, listener } of listeners) process.off(signal, listener);
		};
	}
}

/** Why an agent is lost, as a part of a sentence. */
function endOf(closed: boolean): string {
	return closed ? "its connection has ended" : `it is silent for ${beats.silence / 1000} s`;
}
