/**
 * Starts the ranks of a run on this host as child processes, watches them, and ends all if one fails: within ten seconds every
 * rank has ended and one diagnosis is printed.
 */
import { randomBytes } from "node:crypto";
import { existsSync } from "node:fs";
import { join } from "node:path";
import type { Subprocess } from "bun";
import type { Library } from "../native/library.ts";
import { Run } from "../native/run.ts";
import { beforeLine, type TerminalStream } from "../observe/progress.ts";
import { messageOf, type UserError } from "../system/errors.ts";
import { exitCodes, signalExit } from "../system/exit-codes.ts";
import { recordingName } from "./diagnosis.ts";
import { environmentOf } from "./place.ts";
import { loopback } from "./rendezvous/line-connection.ts";
import type { Identity } from "./rendezvous/messages.ts";
import { RendezvousServer } from "./rendezvous/server.ts";

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
	/** Called with lines about the run itself: its processes, the diagnosis. */
	readonly log: (line: string, kind: "information" | "failure") => void;
}

/** Exit codes of a rank that has finished, successfully or with a negative result. */
const finishedCodes: readonly number[] = [0, exitCodes.failure, exitCodes.interrupted, exitCodes.runAgain];
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
/** Milliseconds for ranks to end by themselves after a failure before they are killed; the rank to blame may be hung. */
const grace = { blamed: 500, others: 2500 };

/** Returns the exit code: 0 if every rank has finished, `exitCodes.runAgain` if they ask to be started again. */
export async function launch(options: LaunchOptions): Promise<number> {
	using job = new Job(options);
	return await job.run();
}

interface Child {
	readonly process: Subprocess;
	/** Resolves when the process has ended and all its output has been read. */
	readonly ended: Promise<unknown>;
	exited: boolean;
}

class Job implements Disposable {
	readonly #run: Run;
	readonly #children: Child[] = [];
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
		const { library, ranks, timeoutMinutes } = options;
		this.#run = Run.create(library, { ranks, supervised: true, timeoutMinutes });
	}

	async run(): Promise<number> {
		const { identity, ranks, timeoutMinutes, log } = this.options;
		const secret = randomBytes(32).toString("hex");
		using server = await RendezvousServer.open(loopback, 0, secret, identity);
		const stopListening = this.#listenToSignals();
		const watch = setInterval(() => this.#poll(), watchInterval);
		try {
			for (let rank = 0; rank < ranks && this.#interrupted === null; rank++) {
				this.#start(rank, server.port, secret);
				// Signals are handled in turns of the event loop.
				if (rank % startsBetweenTurns === startsBetweenTurns - 1) await Bun.sleep(0);
			}
			this.#children.forEach(({ process }, rank) => {
				const { module, coordinates } = this.options.describe(rank);
				log(`rank ${rank}: pid ${process.pid} (${module}, ${coordinates})`, "information");
			});
			const allRanks = this.#children.map((_, rank) => rank);
			void server.waitForRanks(allRanks, timeoutMinutes * 60_000).then(
				() => server.announceRun(this.#run.path),
				(error: UserError) => {
					if (this.#over || this.#run.watch() !== null) return;
					if (server.disconnected === null) this.#run.fail(null, error.message);
					else void this.#blameDisconnected(server.disconnected);
				},
			);
			await Promise.all(this.#children.map(({ ended }) => ended));
		} finally {
			this.#over = true;
			clearInterval(watch);
			stopListening();
		}
		return this.#conclude();
	}

	/** Kills all ranks, so that none outlives the launcher. */
	[Symbol.dispose](): void {
		for (const { process, exited } of this.#children) if (!exited) process.kill("SIGKILL");
		this.#run[Symbol.dispose]();
	}

	#start(rank: number, port: number, secret: string): void {
		const { command, ranks, reporter } = this.options;
		const isReporter = rank === reporter;
		const place = {
			rank,
			worldSize: ranks,
			localRank: rank,
			localSize: ranks,
			address: loopback,
			port,
			secret,
			launcher: process.pid,
		};
		const to = isReporter ? "inherit" : "pipe";
		const child = Bun.spawn([...command], {
			argv0: process.argv0,
			env: { ...process.env, ...environmentOf(place) },
			// The last descriptor is `launcherErrors`.
			stdio: ["ignore", to, to, process.stderr.fd],
		});
		const { module, coordinates } = this.options.describe(rank);
		this.#run.describe(rank, module, coordinates);
		this.#run.expect(rank, child.pid);
		const prefix = `[rank ${rank} ${module}] `;
		const output = isReporter
			? Promise.resolve()
			: Promise.all([
					forwardLines(child.stdout as ReadableStream<Uint8Array>, process.stdout, prefix),
					forwardLines(child.stderr as ReadableStream<Uint8Array>, process.stderr, prefix),
				]);
		const exited = child.exited.then(() => this.#exited(rank, child.exitCode, child.signalCode));
		this.#children.push({ process: child, ended: Promise.all([exited, output]), exited: false });
	}

	/** Reports a rank that disconnected before all had joined; its process's end, if it comes in time, says more (#exited). */
	async #blameDisconnected(rank: number): Promise<void> {
		await Promise.race([this.#children[rank]!.process.exited, Bun.sleep(exitTime)]);
		if (!this.#over && this.#run.watch() === null) this.#run.fail(rank, "it ended before all had joined");
	}

	async #exited(rank: number, code: number | null, signal: Subprocess["signalCode"]): Promise<void> {
		this.#children[rank]!.exited = true;
		// A terminal sends Ctrl-C to ranks and launcher alike; a rank that has not installed its handler dies of it at once.
		if (this.#interrupted === null && forwardedSignals.some((forwarded) => forwarded === signal))
			await Bun.sleep(groupDelivery);
		const { phase, error } = this.#run.rankState(rank);
		const finished = phase === "finished" && code !== null && finishedCodes.includes(code);
		if (finished) this.#finished = Math.max(this.#finished, code);
		if (this.#run.watch() === null && !finished) {
			if (this.#interrupted !== null && signal === this.#interrupted) {
				this.#run.fail(null, `interrupted by ${signal}`);
			} else if (code === exitCodes.unread) {
				this.#outputClosed = true;
				this.#run.fail(null, "nobody reads its output");
			} else if (signal !== null) {
				this.#run.fail(rank, `it was killed by ${signal}`);
			} else {
				this.#run.fail(rank, code === 0 ? "it ended before its work was done" : `it ended with exit code ${code}`);
			}
		}
		// A rank that fails by itself reports its error before it ends.
		if (error !== "" && this.#run.watch()?.rank === rank) this.#exitCode = code ?? 0;
		this.#poll();
	}

	/** Polls the run; after a failure gives its ranks the grace period and then kills them. */
	#poll(): void {
		const failure = this.#run.watch();
		if (failure === null) return;
		this.#failedAt ??= performance.now();
		const since = performance.now() - this.#failedAt;
		this.#children.forEach(({ process, exited }, rank) => {
			// A rank that has not joined cannot notice the failure.
			const joined = this.#run.rankState(rank).host !== "";
			const patience = !joined ? 0 : failure.rank === rank ? grace.blamed : grace.others;
			if (!exited && since >= patience) process.kill("SIGKILL");
		});
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
				for (const { process, exited } of this.#children) if (!exited) process.kill(repeated ? "SIGKILL" : signal);
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
		// The ranks print the diagnosis themselves if this process was stopped meanwhile.
		if (this.#run.claimDiagnosis()) {
			for (const line of this.#run.diagnosis().split("\n")) this.options.log(line, "failure");
		}
		return this.#exitCode || exitCodes.failure;
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

/** Writes each line of `from` to `to` with `prefix`; resolves at the end of `from`. */
async function forwardLines(from: ReadableStream<Uint8Array>, to: TerminalStream, prefix: string): Promise<void> {
	const decoder = new TextDecoder();
	let rest = "";
	for await (const bytes of from) {
		const lines = (rest + decoder.decode(bytes, { stream: true })).split("\n");
		rest = lines.pop()!;
		for (const line of lines) to.write(`${beforeLine(to)}${prefix}${line}\n`);
	}
	rest += decoder.decode();
	if (rest !== "") to.write(`${beforeLine(to)}${prefix}${rest}\n`);
}
