/**
 * The ranks of an agent from one generation to the next: their processes, which stay where a failure leaves them alive, and what
 * becomes of them. Ranks of a run over several hosts watch each other, as under torchrun; the agent adds how its own processes end.
 */
import { createServer } from "node:net";
import type { Library } from "../../native/library.ts";
import { Run } from "../../native/run.ts";
import { exitCodes } from "../../system/exit-codes.ts";
import type { Place } from "../place.ts";
import { RankMemory } from "../rank-memory.ts";
import { finishedCodes, grace, RankProcess } from "../rank-process.ts";
import type { Layout } from "./leader.ts";
import type { AgentFailure, Begin } from "./messages.ts";

export interface HostRanksOptions {
	readonly command: readonly string[];
	readonly library: Library;
	readonly layouts: readonly Layout[];
	/** Ranks of this agent. */
	readonly seats: number;
	/** Of its first rank, and of all agents of the host. */
	readonly localRank: number;
	readonly localSize: number;
	readonly secret: string | null;
	readonly node: string;
	readonly met: () => void;
	readonly failed: (failure: AgentFailure) => void;
	readonly finished: (code: number) => void;
}

/** The generation that the ranks are in. */
interface Current {
	readonly generation: number;
	/** Index of the run's layout. */
	readonly layout: number;
	/** Of the agent's first rank. */
	readonly first: number;
	/** Its host's shared memory; null: not all ranks have met. */
	run: Run | null;
	readonly met: Set<RankProcess>;
	/** Processes that have left the generation, alive. */
	readonly waiting: Set<RankProcess>;
	/** The first failure seen from here. */
	failure: AgentFailure | null;
	/** Whether the generation is being stopped. */
	stopping: boolean;
	/** Exit code of the ranks that have finished. */
	code: number;
}

/** A rank's report to its agent (src/launch/place.ts). */
export type RankReport = { readonly met: string } | { readonly waits: number };

const watchInterval = 100;

export class HostRanks implements Disposable {
	readonly #memory: RankMemory;
	readonly #processes: RankProcess[] = [];
	#current: Current | null = null;
	readonly #watch = setInterval(() => this.#poll(), watchInterval);

	constructor(private readonly options: HostRanksOptions) {
		this.#memory = new RankMemory(options.seats);
	}

	get generation(): number {
		return this.#current?.generation ?? 0;
	}

	/** First of its ranks; null: it has none. */
	get first(): number | null {
		return this.#current?.first ?? null;
	}

	/**
	 * Lets the ranks from `first` on meet the others: processes that wait go on, others are started. Processes of another layout
	 * end: their configuration is another.
	 */
	begin({ generation, first, layout, meeting: { port } }: Begin, address: string): void {
		this.#current?.run?.[Symbol.dispose]();
		if (this.#current !== null && this.#current.layout !== layout) {
			for (const process of this.#processes.splice(0)) process.kill("SIGKILL");
		}
		const current = {
			generation,
			first,
			layout,
			run: null,
			met: new Set<RankProcess>(),
			waiting: new Set<RankProcess>(),
		};
		this.#current = { ...current, failure: null, stopping: false, code: 0 };
		for (let seat = 0; seat < this.options.seats; seat++) {
			const place = this.#placeOf(seat, address, port);
			const known = this.#processes[seat];
			if (known !== undefined && !known.exited) {
				const { rank, localRank, restarts } = place;
				void known.goOn({ ...restarts!, rank, localRank, address, port });
			} else this.#start(seat, place);
		}
	}

	#placeOf(seat: number, address: string, port: number): Place {
		const { layouts, localSize, secret, node } = this.options;
		const { generation, first, layout } = this.#current!;
		const { ranks } = layouts[layout]!;
		return {
			rank: first + seat,
			worldSize: ranks,
			localRank: this.options.localRank + seat,
			localSize,
			node,
			address,
			port,
			secret,
			launcher: null,
			restarts: { generation, layout, ...this.#memory.pathsOf(seat), agent: process.pid },
		};
	}

	#start(seat: number, place: Place): void {
		this.#processes[seat] = new RankProcess({
			command: [...this.options.command, ...this.options.layouts[this.#current!.layout]!.flags],
			place,
			inherits: true,
			onExit: async (ended) => this.#exited(seat, ended),
			onReport: (from, report) => this.#reported(from, report as RankReport),
		});
	}

	#reported(from: RankProcess, report: RankReport): void {
		const current = this.#current;
		if (current === null || from.exited || !this.#processes.includes(from)) return;
		if ("waits" in report) {
			if (report.waits === current.generation) current.waiting.add(from);
			return;
		}
		current.run ??= this.#open(report.met, this.options.layouts[current.layout]!.ranks);
		current.met.add(from);
		if (current.met.size === this.options.seats) this.options.met();
	}

	/** null: the process that has made it is gone. */
	#open(path: string, ranks: number): Run | null {
		try {
			return Run.open(this.options.library, path, ranks);
		} catch {
			return null;
		}
	}

	#exited(seat: number, ended: RankProcess): void {
		const current = this.#current;
		if (current === null || this.#processes[seat] !== ended) return;
		const { code, signal } = ended;
		const rank = current.first + seat;
		const state = current.run?.rankState(rank) ?? null;
		if (state?.phase === "finished" && code !== null && finishedCodes.includes(code)) {
			current.code = Math.max(current.code, code);
			const all = this.#processes.every(({ exited }) => exited);
			if (all && current.failure === null && !current.stopping) this.options.finished(current.code);
			return;
		}
		// It ended because of another: which one, its host's memory tells.
		if (code === exitCodes.endedByAnother) {
			this.#poll();
			this.#note({ rank: null, reason: "a rank has ended because another one failed", own: false, code: 1 });
			return;
		}
		const said = state?.error || (signal === null ? `it ended with exit code ${code}` : `it was killed by ${signal}`);
		if (current.run?.watch() === null) current.run.fail(rank, said);
		// Ranks that do not meet end so where any of them is lost.
		const own = signal === null && (current.generation === 0 || current.run !== null);
		this.#note({ rank, reason: said, own, code: own ? code! : exitCodes.failure });
	}

	/** Tells the leader of the first failure. */
	#note(failure: Omit<AgentFailure, "step" | "interrupted">): void {
		const current = this.#current!;
		const known = current.failure;
		// The end of a rank's process says more than that others miss it.
		if (known !== null && (known.own || known.rank !== failure.rank || !failure.own)) return;
		current.failure = { ...failure, step: this.#step(), interrupted: false };
		if (known === null) this.options.failed(current.failure);
	}

	#step(): number {
		const { run, first } = this.#current!;
		if (run === null) return 0;
		return Math.min(...Array.from({ length: this.options.seats }, (_, seat) => run.rankState(first + seat).step));
	}

	#poll(): void {
		const failure = this.#current?.run?.watch() ?? null;
		if (failure !== null) this.#note({ ...failure, own: false, code: exitCodes.failure });
	}

	/**
	 * Ends the generation: ranks that notice it leave their step and wait, others are killed. Resolves with the failure as it was
	 * seen here.
	 */
	async stop(rank: number | null, reason: string): Promise<AgentFailure | null> {
		const current = this.#current;
		if (current === null) return null;
		current.stopping = true;
		if (current.run?.watch() === null) current.run.fail(rank, reason);
		const began = performance.now();
		for (;;) {
			const busy = this.#processes.filter((one) => !one.exited && !current.waiting.has(one));
			if (busy.length === 0) return current.failure;
			const since = performance.now() - began;
			this.#processes.forEach((process, seat) => {
				if (!busy.includes(process)) return;
				const patience = !current.met.has(process) ? 0 : current.first + seat === rank ? grace.blamed : grace.others;
				if (since >= patience) process.kill("SIGKILL");
			});
			await Bun.sleep(10);
		}
	}

	signal(signal: NodeJS.Signals): void {
		for (const process of this.#processes) process.kill(signal);
	}

	/** Resolves when all processes have ended: those that wait are told to. */
	async end(): Promise<void> {
		for (const process of this.#processes) void process.goOn(null);
		const late = setTimeout(() => this.signal("SIGKILL"), grace.others);
		await Promise.all(this.#processes.map(({ ended }) => ended));
		clearTimeout(late);
	}

	[Symbol.dispose](): void {
		clearInterval(this.#watch);
		this.signal("SIGKILL");
		this.#current?.run?.[Symbol.dispose]();
		this.#memory[Symbol.dispose]();
	}
}

/** A port of this host that is free now. */
export async function freePort(): Promise<number> {
	const server = createServer();
	await new Promise<void>((resolve, reject) => {
		server.once("error", reject);
		server.listen(0, resolve);
	});
	const address = server.address();
	await new Promise((resolve) => server.close(resolve));
	return typeof address === "object" && address !== null ? address.port : 0;
}
