/**
 * Starts the ranks of a run on this host as child processes, watches them, and ends all if one fails: within ten seconds every
 * rank has ended and one diagnosis is printed. Where restarts are asked for, the ranks meet again instead: processes that the
 * failure has not ended stay, others are replaced (docs/decisions/restarts.md).
 */
import { randomBytes } from "node:crypto";
import { existsSync } from "node:fs";
import { join } from "node:path";
import type { Library } from "../native/library.ts";
import { Run, type RunFailure } from "../native/run.ts";
import { messageOf, type UserError } from "../system/errors.ts";
import { exitCodes, signalExit } from "../system/exit-codes.ts";
import { recordingName } from "./diagnosis.ts";
import type { NextPlace } from "./place.ts";
import { RankMemory } from "./rank-memory.ts";
import { finishedCodes, grace, RankProcess } from "./rank-process.ts";
import { loopback } from "./rendezvous/line-connection.ts";
import type { Identity } from "./rendezvous/messages.ts";
import { RendezvousServer } from "./rendezvous/server.ts";
import { type Failure, type RestartOptions, RestartPolicy } from "./restart-policy.ts";
import { Spares } from "./spares.ts";

/** How diagnoses and prefixed output name a rank. */
export interface RankDescription {
	/** Module, such as "language". */
	readonly module: string;
	/** Coordinates in the module's grid, such as "tp 0 dp 1". */
	readonly coordinates: string;
}

export interface LaunchOptions {
	/** Command line of a rank. */
	readonly command: readonly string[];
	readonly ranks: number;
	readonly library: Library;
	/** The launcher's identity, with which every rank's is compared. */
	readonly identity: Identity;
	readonly describe: (rank: number) => RankDescription;
	/** The rank whose output is forwarded unchanged; other ranks' lines are prefixed. */
	readonly reporter: number;
	/** Minutes without progress after which a living rank counts as failed. */
	readonly timeoutMinutes: number;
	/** Folder for the ranks' recordings; null: no recordings. */
	readonly recordings?: string | null;
	/** null: a failure ends the run. */
	readonly restarts?: RestartOptions | null;
	/** Called with lines about the run itself: its processes, the diagnosis. */
	readonly log: (line: string, kind: "information" | "failure") => void;
}

const forwardedSignals = ["SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1"] as const;
const watchInterval = 200;
/** Milliseconds after a rank's disconnection in which its process may end and so report a crash. */
const exitTime = 2000;
/** Milliseconds until a signal to the process group has reached this process as well. */
const groupDelivery = 100;
/** Milliseconds within which two SIGINTs are one key press: a terminal and a parent such as npm each pass it on. */
const sameKeyPress = 500;
/** Ranks that are started between two turns of the event loop. */
const startsBetweenTurns = 16;

/** Returns the exit code: 0 if every rank has finished, `exitCodes.runAgain` if they ask to be started again. */
export async function launch(options: LaunchOptions): Promise<number> {
	using job = new Job(options);
	return await job.run();
}

/** The ranks from a rendezvous to the next failure, or to the end. */
interface Generation {
	readonly number: number;
	readonly run: Run;
	readonly server: RendezvousServer;
	/** Processes of the generation before that have been told to go on in this one and have not come yet. */
	readonly awaited: Set<RankProcess>;
	/** Ranks with a new process. */
	readonly replaced: number[];
	/** Resolves with the time of a failure that a restart may follow; with null when every process has ended. */
	readonly over: PromiseWithResolvers<number | null>;
}

class Job implements Disposable {
	/** null: no shared memory was made. */
	#current: Generation | null = null;
	/** The generation before, until all ranks have met in this one: its ranks look whether the launcher lives. */
	#before: Generation | null = null;
	readonly #secret = randomBytes(32).toString("hex");
	/** By rank. */
	readonly #processes: RankProcess[] = [];
	readonly #policy: RestartPolicy | null;
	readonly #memory: RankMemory | null;
	readonly #spares: Spares;
	/** Why the run is not restarted; null: no restart was asked for. */
	#refusal: string | null = null;
	/** The latest signal that this process received. */
	#interrupted: NodeJS.Signals | null = null;
	#interruptedAt = 0;
	/** Whether the reader of the reporting rank's output has closed it (EPIPE). */
	#outputClosed = false;
	/** Exit code of the ranks that have finished. */
	#finished = 0;
	/** Exit code of the first rank that failed by itself. */
	#exitCode = 0;
	/** Time at which the failure was noticed; null: no failure. */
	#failedAt: number | null = null;
	#over = false;

	constructor(private readonly options: LaunchOptions) {
		const { restarts = null, ranks } = options;
		this.#policy = restarts && new RestartPolicy(restarts);
		this.#memory = restarts && new RankMemory(ranks);
		this.#spares = new Spares(restarts?.spares ?? 0, () => this.#startProcess(null));
	}

	get #generation(): Generation {
		return this.#current!;
	}

	get #run(): Run {
		return this.#generation.run;
	}

	async run(): Promise<number> {
		await this.#open(0);
		const stopListening = this.#listenToSignals();
		const watch = setInterval(() => this.#poll(), watchInterval);
		try {
			for (let rank = 0; rank < this.options.ranks && this.#interrupted === null; rank++) {
				this.#start(rank);
				// Signals are handled in turns of the event loop.
				if (rank % startsBetweenTurns === startsBetweenTurns - 1) await Bun.sleep(0);
			}
			for (const rank of this.#processes.keys()) this.#announce(rank);
			this.#spares.fill();
			this.#meet();
			this.#noteEnd();
			for (let failedAt: number | null; ; ) {
				failedAt = await this.#generation.over.promise;
				if (failedAt === null || !(await this.#restart(failedAt))) break;
			}
			for (const process of this.#processes) void process.goOn(null);
			await Promise.all(this.#processes.map(({ ended }) => ended));
		} finally {
			this.#over = true;
			clearInterval(watch);
			stopListening();
		}
		return this.#conclude();
	}

	/** Kills all ranks, so that none outlives the launcher. */
	[Symbol.dispose](): void {
		for (const process of this.#processes) process.kill("SIGKILL");
		this.#closeBefore();
		for (const owned of [this.#spares, this.#current?.server, this.#current?.run, this.#memory])
			owned?.[Symbol.dispose]();
	}

	/** Makes the shared memory and the rendezvous of a generation. */
	async #open(number: number): Promise<void> {
		const { library, ranks, timeoutMinutes, identity } = this.options;
		const run = Run.create(library, { ranks, supervised: true, timeoutMinutes });
		const server = await RendezvousServer.open(loopback, 0, this.#secret, identity);
		this.#current = { number, run, server, awaited: new Set(), replaced: [], over: Promise.withResolvers() };
	}

	#closeBefore(): void {
		this.#before?.server[Symbol.dispose]();
		this.#before?.run[Symbol.dispose]();
		this.#before = null;
	}

	/** Lets the ranks meet, and tells them the path of their shared memory; `met` is called when all are there. */
	#meet(met: () => void = () => {}): void {
		const { run, server } = this.#generation;
		const allRanks = this.#processes.map((_, rank) => rank);
		void server.waitForRanks(allRanks, this.options.timeoutMinutes * 60_000).then(
			() => {
				server.announceRun(run.path);
				met();
			},
			(error: UserError) => {
				if (this.#over || run !== this.#run || run.watch() !== null) return;
				if (server.disconnected === null) run.fail(null, error.message);
				else void this.#blameDisconnected(server.disconnected);
			},
		);
	}

	#placeOf(rank: number): NextPlace {
		const { number, server } = this.#generation;
		const meeting = { address: loopback, port: server.port };
		const files = this.#memory?.pathsOf(rank) ?? { memory: "", replica: "" };
		return { rank, localRank: rank, ...meeting, generation: number, layout: 0, ...files };
	}

	/** Starts a rank's process; `rank` null: a spare one, which waits for the place of a rank. */
	#startProcess(rank: number | null): RankProcess {
		const { command, ranks, reporter } = this.options;
		const { port, generation, memory, replica } = this.#placeOf(rank ?? 0);
		const place = {
			rank: rank ?? 0,
			worldSize: ranks,
			localRank: rank ?? 0,
			localSize: ranks,
			address: loopback,
			port,
			secret: this.#secret,
			launcher: process.pid,
			...(this.#memory && { restarts: { generation, layout: 0, memory, replica, spare: rank === null } }),
		};
		const onExit = async (ended: RankProcess) => await this.#exited(this.#processes.indexOf(ended), ended);
		return new RankProcess({ command, place, inherits: rank === reporter, onExit });
	}

	#start(rank: number, process = this.#startProcess(rank)): void {
		const { module, coordinates } = this.options.describe(rank);
		process.prefix = rank === this.options.reporter ? "" : `[rank ${rank} ${module}] `;
		this.#run.describe(rank, module, coordinates);
		this.#run.expect(rank, process.pid);
		this.#processes[rank] = process;
	}

	#announce(rank: number): void {
		const { module, coordinates } = this.options.describe(rank);
		this.options.log(`rank ${rank}: pid ${this.#processes[rank]!.pid} (${module}, ${coordinates})`, "information");
	}

	/** Gives a rank whose process has ended a spare process or a new one. */
	#replace(rank: number): void {
		this.#generation.awaited.delete(this.#processes[rank]!);
		this.#generation.replaced.push(rank);
		// A terminal's view is drawn by a process that writes to it.
		const spare = rank === this.options.reporter && process.stdout.isTTY ? null : this.#spares.take();
		this.#start(rank, spare ?? undefined);
		void spare?.goOn(this.#placeOf(rank));
		this.#announce(rank);
	}

	/** Reports a rank that disconnected before all had joined; its process's end, if it comes in time, says more (#exited). */
	async #blameDisconnected(rank: number): Promise<void> {
		const { run } = this.#generation;
		await this.#processes[rank]!.endedWithin(exitTime);
		if (!this.#over && run === this.#run && run.watch() === null) run.fail(rank, "it ended before all had joined");
	}

	async #exited(rank: number, ended: RankProcess): Promise<void> {
		const { code, signal } = ended;
		// A terminal sends Ctrl-C to ranks and launcher alike; a rank that has not installed its handler dies of it at once.
		if (this.#interrupted === null && forwardedSignals.some((forwarded) => forwarded === signal))
			await Bun.sleep(groupDelivery);
		// A spare process, or one that was replaced.
		if (this.#processes[rank] !== ended) return;
		const { run, server, awaited } = this.#generation;
		if (awaited.has(ended) && !server.members.has(rank) && this.#interrupted === null) {
			// It could not leave the failed generation in time, or ended with it.
			this.#replace(rank);
			return;
		}
		const { phase, error } = run.rankState(rank);
		const finished = phase === "finished" && code !== null && finishedCodes.includes(code);
		if (finished) this.#finished = Math.max(this.#finished, code);
		if (run.watch() === null && !finished) {
			if (this.#interrupted !== null && signal === this.#interrupted) {
				run.fail(null, `interrupted by ${signal}`);
			} else if (code === exitCodes.unread) {
				this.#outputClosed = true;
				run.fail(null, "nobody reads its output");
			} else if (signal !== null) {
				run.fail(rank, `it was killed by ${signal}`);
			} else {
				run.fail(rank, code === 0 ? "it ended before its work was done" : `it ended with exit code ${code}`);
			}
		}
		// A rank that fails by itself reports its error before it ends.
		if (error !== "" && run.watch()?.rank === rank) this.#exitCode = code ?? 0;
		this.#poll();
		this.#noteEnd();
	}

	/** Ends the generation when every process has ended. */
	#noteEnd(): void {
		if (this.#processes.every(({ exited }) => exited)) this.#generation.over.resolve(null);
	}

	/** Polls the run; after a failure gives its ranks the grace period and then kills them. */
	#poll(): void {
		this.#before?.run.watch();
		const failure = this.#run.watch();
		if (failure === null) return;
		this.#failedAt ??= performance.now();
		if (this.#policy !== null && this.#interrupted === null) this.#generation.over.resolve(this.#failedAt);
		const since = performance.now() - this.#failedAt;
		this.#processes.forEach((process, rank) => {
			// A rank that has not joined cannot notice the failure.
			const joined = this.#run.rankState(rank).host !== "";
			const patience = !joined ? 0 : failure.rank === rank ? grace.blamed : grace.others;
			if (since >= patience) process.kill("SIGKILL");
		});
	}

	/**
	 * Begins the next generation after a failure: processes that the failure has left alive are told where to meet, others are
	 * replaced. Returns false where the run ends: it is interrupted, or the policy refuses.
	 */
	async #restart(failedAt: number): Promise<boolean> {
		const failure = this.#run.watch()!;
		const blamed = failure.rank === null ? null : this.#processes[failure.rank]!;
		// #poll() kills it.
		while (blamed?.exited === false) await blamed.endedWithin(watchInterval);
		if (this.#interrupted !== null || this.#outputClosed) return false;
		this.#refusal = this.#policy!.refusal(this.#describe(failure, blamed), performance.now());
		if (this.#refusal !== null) return false;
		this.#record();
		this.#report();
		const { number } = this.#generation;
		this.#closeBefore();
		this.#before = this.#generation;
		await this.#open(number + 1);
		this.#failedAt = null;
		this.#exitCode = 0;
		const { awaited, server, replaced } = this.#generation;
		this.#processes.forEach((process, rank) => {
			if (process.exited) this.#replace(rank);
			else {
				awaited.add(process);
				void process.goOn(this.#placeOf(rank));
			}
		});
		const late = setTimeout(
			() => {
				this.#processes.forEach((process, rank) => {
					const current = server === this.#generation.server;
					if (current && awaited.has(process) && !server.members.has(rank)) process.kill("SIGKILL");
				});
			},
			Math.max(0, grace.others - (performance.now() - failedAt)),
		);
		this.#meet(() => {
			clearTimeout(late);
			awaited.clear();
			this.#spares.fill();
			this.#closeBefore();
			const seconds = ((performance.now() - failedAt) / 1000).toFixed(2);
			this.options.log(
				`${this.#policy!.sentence(replaced)}; all ranks have met ${seconds} s after the failure.`,
				"failure",
			);
		});
		return true;
	}

	#describe({ rank, reason }: RunFailure, blamed: RankProcess | null): Failure {
		const ranks = rank === null ? this.#processes.map((_, one) => one) : [rank];
		const step = Math.min(...ranks.map((one) => this.#run.rankState(one).step));
		return { rank, reason, step, own: blamed === null || blamed.code !== null };
	}

	/** Forwards signals to the ranks; the same signal again kills them. Returns a function that stops forwarding. */
	#listenToSignals(): () => void {
		const listeners = forwardedSignals.map((signal) => {
			const listener = () => {
				const repeated = this.#interrupted === signal;
				const now = performance.now();
				if (repeated && signal === "SIGINT" && now - this.#interruptedAt < sameKeyPress) return;
				this.#interrupted = signal;
				this.#interruptedAt = now;
				if (repeated) this.#run.fail(null, `interrupted by ${signal}`);
				for (const process of this.#processes) process.kill(repeated ? "SIGKILL" : signal);
			};
			process.on(signal, listener);
			return { signal, listener };
		});
		return () => {
			for (const { signal, listener } of listeners) process.off(signal, listener);
		};
	}

	#conclude(): number {
		const failure = this.#run.watch();
		if (failure === null) return this.#finished;
		this.#record();
		if (this.#outputClosed) return exitCodes.unread;
		if (this.#interrupted !== null && failure.rank === null) {
			this.options.log(`The run was interrupted by ${this.#interrupted}.`, "failure");
			return signalExit(this.#interrupted);
		}
		this.#report();
		if (this.#refusal !== null) this.options.log(this.#refusal, "failure");
		return this.#exitCode || exitCodes.failure;
	}

	/** Prints the diagnosis. */
	#report(): void {
		// The ranks print the diagnosis themselves if this process was stopped meanwhile.
		if (!this.#run.claimDiagnosis()) return;
		for (const line of this.#run.diagnosis().split("\n")) this.options.log(line, "failure");
	}

	/** Writes the recording of every rank, if ranks record: a killed rank could not write its own. */
	#record(): void {
		const { recordings, ranks } = this.options;
		if (!recordings || !existsSync(recordings)) return;
		try {
			for (let rank = 0; rank < ranks; rank++) this.#run.recordRank(rank, join(recordings, recordingName(rank)));
		} catch (error) {
			this.options.log(messageOf(error), "failure");
		}
	}
}
