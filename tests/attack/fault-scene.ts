/** The surroundings of a run that meets a fault: its folder, its processes, and what it may not leave behind. */
import { existsSync, mkdirSync, mkdtempSync, readdirSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { NativeCheckpoint } from "../../src/checkpoint/native/reader.ts";
import { mountNamespace } from "../absent.ts";
import type { Launched } from "../launch/launched.ts";

/** Begins a script that may mount file systems of its own. */
export const namespace = [...mountNamespace, "sh", "-c"];

/** Folder of one run, and a mark in the environment of every process that the run starts. */
export class Scene implements Disposable {
	readonly folder = mkdtempSync(join(tmpdir(), "mimo-fault-"));
	readonly #mark = `MIMO_TEST_FAULT=${crypto.randomUUID()}`;
	readonly #temporary = join(this.folder, "temporary");

	constructor() {
		mkdirSync(this.#temporary);
	}

	get environment(): Record<string, string> {
		const [name, value] = this.#mark.split("=") as [string, string];
		return { [name]: value, TMPDIR: this.#temporary, MIMO_DEBUG: "0" };
	}

	get options() {
		return { cwd: this.folder, env: this.environment };
	}

	path(name: string): string {
		return join(this.folder, name);
	}

	/** Processes of the run that are still alive. */
	processes(): number[] {
		return readdirSync("/proc")
			.filter((name) => /^\d+$/.test(name))
			.map(Number)
			.filter((pid) => {
				try {
					// A process that has ended and was not reaped has an empty environment.
					return readFileSync(`/proc/${pid}/environ`).includes(this.#mark);
				} catch {
					return false;
				}
			});
	}

	/** Resolves when all processes but the spared ones have ended, or 15 s after `seconds`. */
	async empty(seconds: number, spared: readonly number[] = []): Promise<void> {
		const end = performance.now() + (seconds + 15) * 1000;
		while (this.processes().some((pid) => !spared.includes(pid)) && performance.now() < end) await Bun.sleep(20);
	}

	/** Resolves when a save has begun, or the run has ended. */
	async saving(run: Launched): Promise<void> {
		while (run.process.exitCode === null) {
			if (existsSync(this.path("ck")) && readdirSync(this.path("ck")).some((name) => /^iter_.*tmp/.test(name))) return;
			await Bun.sleep(5);
		}
	}

	/** Processes, shared memory and temporary files that the run has left. */
	leftovers(): string[] {
		const left = this.processes().map((pid) => `process ${pid} lives`);
		const own = readdirSync("/dev/shm").filter((name) => name.startsWith("mimo-run-") && !aliveOwner(name));
		left.push(...own.map((name) => `/dev/shm/${name} is left`));
		left.push(...readdirSync(this.#temporary).map((name) => `${name} is left in the temporary folder`));
		return left;
	}

	/** Damage of the checkpoint from which a run would resume. */
	checkpointFault(folder = "ck"): string[] {
		if (!existsSync(this.path(`${folder}/latest.json`))) return [];
		try {
			using checkpoint = NativeCheckpoint.openExactly(this.path(folder));
			checkpoint.verify();
			return [];
		} catch (error) {
			return [(error as Error).message];
		}
	}

	[Symbol.dispose](): void {
		for (const pid of this.processes()) {
			try {
				process.kill(pid, "SIGKILL");
			} catch {
				// It has ended meanwhile.
			}
		}
		rmSync(this.folder, { recursive: true, force: true });
	}
}

/** Whether the process in a name "mimo-run-PID-TIME" still exists. */
function aliveOwner(name: string): boolean {
	return existsSync(`/proc/${name.split("-")[2]}`);
}
