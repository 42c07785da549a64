/** A run that restarts in its job, on one host or on three played ones, which meets one fault after the other. */
import { existsSync, mkdirSync, readFileSync, renameSync, rmdirSync, rmSync, writeFileSync } from "node:fs";
import { Launched } from "../launch/launched.ts";
import { PlayedHosts } from "../launch/played-hosts.ts";
import { command } from "./fault-causes.ts";
import type { Scene } from "./fault-scene.ts";
import { keptFile, turnBit } from "./wrong-bit.ts";

/**
 * kill, crash, stop: a signal to a rank. error: of a rank, which cannot save for a moment. memory: a rank may take no more. two
 * ranks, all ranks: killed together. again: another rank is killed while the first is replaced. launcher: killed, and the command
 * is given again. wrong result: a bit of what a rank updates is another. disk: it is full until a save has failed, and the run goes
 * on without a restart. On three hosts, of which one is spare: host: the launcher of one that has ranks is killed, and comes back; cut:
 * its link is cut, and it comes back; slow: its link is slow for a while; first host: the launcher of the first is killed.
 */
export type RestartCause =
	| ("kill" | "crash" | "two ranks" | "stop" | "error" | "memory" | "again" | "all ranks" | "launcher")
	| ("wrong result" | "disk")
	| HostCause;
type HostCause = "host" | "cut" | "slow" | "first host";

export interface Recovery {
	readonly cause: RestartCause;
	/** From the fault to the end of the next step; NaN: the run never went on. */
	readonly seconds: number;
	/** Steps that every rank had finished and that were done again. */
	readonly lost: number;
}

/** Most seconds until a run goes on. */
const longest = 60;
const crashes = ["SIGSEGV", "SIGABRT", "SIGBUS", "SIGILL", "SIGTERM"] as const;
/** Kilobits a second of a slow link: a beat takes half a second, less than the silence that counts as a loss. */
const slowLink = 6;
/** Ranks of a played host. */
const perHost = 2;

/** Whether values of a step are equal, or differ by no more than a share of them. */
export function agree(a: readonly number[] | undefined, b: readonly number[], tolerance: number): boolean {
	return a !== undefined && b.every((value, index) => Math.abs(value - a[index]!) <= tolerance * Math.abs(value));
}

/** What a log says: the values of every step, and the latest step. */
export function readSteps(
	file: string,
	tolerance = 0,
): { values: Map<number, readonly number[]>; last: number; contradictions: string[] } {
	const values = new Map<number, readonly number[]>();
	const contradictions: string[] = [];
	let last = 0;
	for (const line of existsSync(file) ? readFileSync(file, "utf8").trim().split("\n") : []) {
		const { iteration, event, split, grad_norm: norm, consumed_samples: consumed, ...rest } = JSON.parse(line || "{}");
		if (iteration === undefined || event !== undefined || split !== undefined) continue;
		const value = [rest["lm loss"], norm, consumed, rest.learning_rate, rest.tokens];
		if (!agree(values.get(iteration) ?? value, value, tolerance))
			contradictions.push(`step ${iteration} was ${values.get(iteration)}, then ${value}`);
		values.set(iteration, value);
		last = iteration;
	}
	return { values, last, contradictions };
}

/** Lines of a log so far, of steps alone. */
function countSteps(file: string): number {
	return existsSync(file) ? (readFileSync(file, "utf8").match(/^\{"iteration":\d+,"consumed/gm)?.length ?? 0) : 0;
}

/** A run's launchers: one, or one a played host. */
class Launchers implements Disposable {
	readonly #played: PlayedHosts | null;
	/** All that were started, the latest of each host too. */
	readonly #all: Launched[] = [];
	readonly #latest: Launched[] = [];

	constructor(
		private readonly scene: Scene,
		private readonly flags: string,
		readonly hosts: number,
	) {
		this.#played = hosts > 1 ? new PlayedHosts(hosts) : null;
		for (let host = 0; host < hosts; host++) this.start(host);
	}

	start(host: number): void {
		const { folder: cwd, environment } = this.scene;
		const played = this.#played;
		const place =
			played === null
				? {}
				: {
						NNODES: String(this.hosts),
						NODE_RANK: String(host),
						NPROC_PER_NODE: String(perHost),
						MASTER_ADDR: played.address(0),
						MIMO_SECRET: "of the faulted run",
					};
		const launched = Launched.run([...(played?.on(host) ?? []), ...command(this.flags)], {
			cwd,
			env: { ...environment, ...place },
		});
		this.#all.push(launched);
		this.#latest[host] = launched;
	}

	get network(): PlayedHosts {
		return this.#played!;
	}

	pid(host: number): number {
		return this.#latest[host]!.process.pid;
	}

	async ended(host: number): Promise<void> {
		await this.#latest[host]!.end();
	}

	get errors(): string {
		return this.#all.map(({ errors }) => errors).join("\n");
	}

	/** Whether no launcher is left. */
	get over(): boolean {
		return this.#latest.every(({ process }) => process.exitCode !== null || process.signalCode !== null);
	}

	/** Processes of ranks, and the host of each. */
	ranks(): { readonly pid: number; readonly host: number }[] {
		// A launcher of all ranks tells which of its processes are not spare.
		if (this.hosts === 1) {
			const said = [...this.#latest[0]!.output.matchAll(/^rank (\d+): pid (\d+)/gm)];
			return [...new Map(said.map(([, rank, pid]) => [rank, Number(pid)])).values()].map((pid) => ({ pid, host: 0 }));
		}
		const launchers = this.#all.map(({ process }) => process.pid);
		return this.scene
			.processes()
			.filter((pid) => !launchers.includes(pid) && keptFile(pid) !== null)
			.flatMap((pid) => {
				const host = this.#latest.findIndex(({ process }) => process.pid === parentOf(pid));
				return host < 0 ? [] : [{ pid, host }];
			});
	}

	/** Exit code and output of the last launchers, of which those on `lost` hosts do not count. */
	async end(lost: readonly number[]): Promise<{ readonly exitCode: number | null; readonly text: string }> {
		const late = setTimeout(() => {
			for (const { process } of this.#latest) process.kill("SIGKILL");
		}, 5000 * longest);
		const ended = await Promise.all(this.#latest.map((launched) => launched.end()));
		clearTimeout(late);
		const code = ended.filter((_, host) => !lost.includes(host)).find(({ exitCode }) => exitCode !== 0)?.exitCode;
		return {
			exitCode: code === undefined ? 0 : code,
			text: ended.map(({ stderr, stdout }) => stderr.slice(-2000) + stdout.slice(-300)).join("\n"),
		};
	}

	[Symbol.dispose](): void {
		for (const { process } of this.#all) process.kill("SIGKILL");
		this.#played?.[Symbol.dispose]();
	}
}

function parentOf(pid: number): number {
	try {
		const stat = readFileSync(`/proc/${pid}/stat`, "utf8");
		return Number(stat.slice(stat.lastIndexOf(")") + 2).split(" ")[1]);
	} catch {
		return 0;
	}
}

/** Causes that a run meets without a restart. */
const unnoticed: readonly RestartCause[] = ["slow", "disk"];

/** Sends a signal to a process, if it still lives. */
function hit(pid: number, signal: NodeJS.Signals): void {
	try {
		process.kill(pid, signal);
	} catch {
		// It has ended meanwhile.
	}
}

/** The group of processes that a memory limit makes (cgroup v1). */
const limitedGroup = (pid: number) => `/sys/fs/cgroup/memory/mimo-limited-${pid}`;

/** Whether this machine lets a test limit a process's memory. */
export function canLimitMemory(): boolean {
	try {
		mkdirSync(limitedGroup(process.pid));
		rmdirSync(limitedGroup(process.pid));
		return true;
	} catch {
		return false;
	}
}

/** From now on a process may take one megabyte more: then the system kills it. */
function limitMemory(pid: number): void {
	const group = limitedGroup(pid);
	mkdirSync(group);
	writeFileSync(`${group}/memory.limit_in_bytes`, String(2 ** 20));
	writeFileSync(`${group}/cgroup.procs`, String(pid));
}

export class FaultedRun implements Disposable {
	readonly #launchers: Launchers;
	readonly #log: string;
	/** Hosts that a fault has taken for good. */
	readonly #lost: number[] = [];
	/** When a fault came that waits for its moment, and the last step that all ranks had finished. */
	#marked: readonly [began: number, finished: number] = [0, 0];
	/** What it said when it did not go on. */
	readonly stops: string[] = [];

	/** `flags` name the log faulted.jsonl and the folder faulted. */
	constructor(
		private readonly scene: Scene,
		flags: string,
		hosts: number,
		private readonly random: () => number,
		private readonly saveInterval: number,
	) {
		this.#launchers = new Launchers(scene, flags, hosts);
		this.#log = scene.path("faulted.jsonl");
	}

	/** Lets the run meet a fault a few steps from now; null: it has ended before a rank has read a turned bit. */
	async meet(cause: RestartCause): Promise<Recovery | null> {
		const before = countSteps(this.#log);
		await this.#until(() => countSteps(this.#log) >= before + 2);
		await Bun.sleep(60 * this.random());
		const restarts = this.#restarts();
		// Every rank has finished the steps before the last that is in the log.
		let finished = readSteps(this.#log).last - 1;
		let began = performance.now();
		const undo = await this.#cause(cause);
		if (cause === "error") this.#mark();
		if (cause === "error" || cause === "wrong result") [began, finished] = this.#marked;
		const restarting = !unnoticed.includes(cause);
		if (cause !== "launcher" && restarting) await this.#until(() => this.#restarts() > restarts);
		if (cause === "wrong result" && this.#launchers.over && this.#restarts() === restarts) return null;
		const seen = this.#starts();
		const lines = countSteps(this.#log);
		await this.#until(() => countSteps(this.#log) > lines);
		const seconds = countSteps(this.#log) > lines ? (performance.now() - began) / 1000 : Number.NaN;
		if (Number.isNaN(seconds))
			this.stops.push(`after ${cause} it did not go on: ${this.#launchers.errors.slice(-3000)}`);
		if (!restarting && this.#restarts() > restarts) this.stops.push(`${cause} restarted the run`);
		const from = this.#starts().at(-1) ?? seen.at(-1) ?? 0;
		await undo?.();
		return { cause, seconds, lost: !restarting ? 0 : Math.max(0, finished - from) };
	}

	#mark(): void {
		this.#marked = [performance.now(), readSteps(this.#log).last - 1];
	}

	async end() {
		return await this.#launchers.end(this.#lost);
	}

	#restarts(): number {
		return [...this.#launchers.errors.matchAll(/^mimo: Restart \d+ of at most/gm)].length;
	}

	/** The steps after which the starts so far went on. */
	#starts(): number[] {
		return [...readFileSync(this.#log, "utf8").matchAll(/^\{"event":"start","step":(\d+)/gm)].map(([, step]) =>
			Number(step),
		);
	}

	/** Causes the fault. Returns what undoes it once the run has gone on, if anything does. */
	async #cause(cause: RestartCause): Promise<(() => Promise<void>) | undefined> {
		const launchers = this.#launchers;
		const ranks = launchers.ranks();
		const pids = ranks.map(({ pid }) => pid);
		const first = Math.floor(pids.length * this.random());
		const victim = pids[first]!;
		const other = pids[(first + 1 + Math.floor((pids.length - 1) * this.random())) % pids.length]!;
		// The first host leads.
		const host = ranks.find((one) => one.host !== 0)?.host ?? 0;
		switch (cause) {
			case "kill":
				hit(victim, "SIGKILL");
				return;
			case "crash":
				hit(victim, crashes[Math.floor(crashes.length * this.random())]!);
				return;
			case "stop":
				hit(victim, "SIGSTOP");
				return;
			case "memory":
				limitMemory(victim);
				return async () => rmdirSync(limitedGroup(victim));
			case "two ranks":
				hit(victim, "SIGKILL");
				hit(other, "SIGKILL");
				return;
			case "all ranks":
				for (const pid of pids) hit(pid, "SIGKILL");
				return;
			case "error":
				await this.#failToSave();
				return;
			case "wrong result":
				await this.#turnBit(victim);
				return;
			case "disk":
				await this.#fillDisk();
				return;
			case "again":
				hit(victim, "SIGKILL");
				await Bun.sleep(800 * this.random());
				hit(other, "SIGKILL");
				return;
			case "launcher":
				hit(launchers.pid(0), "SIGKILL");
				await launchers.ended(0);
				await this.scene.empty(10);
				launchers.start(0);
				return;
			case "host":
				hit(launchers.pid(host), "SIGKILL");
				return async () => await this.#comeBack(host);
			case "cut":
				launchers.network.cut(host);
				return async () => {
					hit(launchers.pid(host), "SIGKILL");
					launchers.network.mend(host);
					await this.#comeBack(host);
				};
			case "slow":
				launchers.network.slow(host, slowLink);
				return async () => {
					const before = countSteps(this.#log);
					await this.#until(() => countSteps(this.#log) > before);
					launchers.network.mend(host);
				};
			case "first host":
				hit(launchers.pid(0), "SIGKILL");
				this.#lost.push(0);
		}
		return;
	}

	/** Starts a lost host's launcher anew, and waits until the host is spare. */
	async #comeBack(host: number): Promise<void> {
		const joined = () => this.#launchers.errors.match(/^mimo: Host .* has joined and is spare/gm)?.length ?? 0;
		const before = joined();
		this.#launchers.start(host);
		await this.#until(() => joined() > before);
	}

	/** Puts a file in the place of the folder of checkpoints, until a rank has failed of it. */
	async #failToSave(): Promise<void> {
		const [folder, away] = [this.scene.path("faulted"), this.scene.path("away")];
		const said = () => this.#launchers.errors.match(/^mimo: rank \d+ .* failed: /gm)?.length ?? 0;
		const before = said();
		renameSync(folder, away);
		writeFileSync(folder, "");
		await this.#until(() => said() > before);
		rmSync(folder);
		renameSync(away, folder);
	}

	/**
	 * Turns a bit of a process until the run has noticed it: an update may write over one that nothing has read. A step that is saved is
	 * left alone: its checkpoint would be another.
	 */
	async #turnBit(pid: number): Promise<void> {
		const restarts = this.#restarts();
		const noticed = () => this.#restarts() > restarts;
		let next = 0;
		await this.#until(() => {
			if (noticed()) return true;
			if (countSteps(this.#log) < next) return false;
			const { last } = readSteps(this.#log);
			if (last % this.saveInterval !== 0 && turnBit(pid, last, this.random)) {
				this.#mark();
				next = countSteps(this.#log) + 4;
			}
			return false;
		});
	}

	/** Leaves no room on the disk of the checkpoints until one was not saved. */
	async #fillDisk(): Promise<void> {
		const said = () => this.#launchers.errors.match(/ was not saved, training goes on: .*no space left/g)?.length ?? 0;
		const before = said();
		const filler = this.scene.path("faulted/filler");
		Bun.spawnSync(["dd", "if=/dev/zero", `of=${filler}`, "bs=64k"], { stderr: "ignore" });
		await this.#until(() => said() > before);
		if (said() === before) this.stops.push("a full disk was not noticed");
		this.stops.push(...this.scene.checkpointFault("faulted"));
		rmSync(filler);
	}

	async #until(condition: () => boolean): Promise<void> {
		const end = performance.now() + 1000 * longest;
		while (!condition() && performance.now() < end && !this.#launchers.over) await Bun.sleep(20);
	}

	[Symbol.dispose](): void {
		this.#launchers[Symbol.dispose]();
	}
}
