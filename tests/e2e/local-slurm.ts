/** A Slurm of two nodes on this machine, as its own user's processes: slurmctld, two slurmd, munged. Needs root. */
import { chmodSync, existsSync, mkdirSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { hostname, tmpdir } from "node:os";
import { join } from "node:path";
import type { Subprocess } from "bun";
import { absent, hasPrograms } from "../absent.ts";

/** Whether there can be one here. */
export function canRunSlurm(): boolean {
	const programs = ["slurmctld", "slurmd", "munged", "sbatch", "srun", "scancel"];
	if (!hasPrograms(programs, "slurmctld slurmd slurm-client munge")) return false;
	return process.getuid?.() === 0 || absent("root, which slurmd -N needs", "sudo") !== null;
}

function isFree(port: number): boolean {
	try {
		Bun.listen({ hostname: "0.0.0.0", port, socket: { data() {} } }).stop(true);
		return true;
	} catch {
		return false;
	}
}

/** The first of three free ports, below those that Linux gives to connections (from 32768): another test takes none of them. */
function freePorts(): number {
	const blocks = 4000;
	for (let i = 0; i < blocks; i++) {
		const first = 20_000 + ((process.pid + i) % blocks) * 3;
		if ([first, first + 1, first + 2].every(isFree)) return first;
	}
	throw new Error("No three ports from 20000 to 32000 are free.");
}

export class LocalSlurm implements AsyncDisposable {
	readonly folder = mkdtempSync(join(tmpdir(), "mimo-slurm-"));
	readonly #daemons: Subprocess[] = [];

	/** Resolves when both nodes are idle. */
	static async start(): Promise<LocalSlurm> {
		const slurm = new LocalSlurm();
		slurm.#configure(freePorts());
		const munge = slurm.#path("munge.socket");
		const key = slurm.#path("key");
		writeFileSync(key, crypto.getRandomValues(new Uint8Array(128)));
		chmodSync(key, 0o400);
		const files = { "pid-file": "munged.pid", "log-file": "munged.log", "seed-file": "seed" };
		const flags = Object.entries(files).map(([flag, name]) => `--${flag}=${slurm.#path(name)}`);
		slurm.#daemon(["munged", "--force", "--foreground", `--socket=${munge}`, `--key-file=${key}`, ...flags]);
		await slurm.until(() => existsSync(munge));
		slurm.#daemon(["slurmctld", "-D"]);
		for (const node of ["n1", "n2"]) slurm.#daemon(["slurmd", "-D", "-N", node]);
		await slurm.until(() => slurm.run(["sinfo", "-h", "-o", "%T %D"]) === "idle 2");
		return slurm;
	}

	/** Submits a script and its arguments, with sbatch's own `options` in front; returns the job's number. */
	submit(
		script: readonly string[],
		output: string,
		environment: Record<string, string>,
		options: readonly string[] = [],
	): string {
		const job = this.run(["sbatch", "--parsable", "-o", output, ...options, ...script], environment);
		if (!/^\d+$/.test(job)) throw new Error(`sbatch said: ${job}`);
		return job;
	}

	/** Output of one of Slurm's commands. */
	run(command: readonly string[], environment: Record<string, string> = {}): string {
		const { stdout, stderr } = Bun.spawnSync([...command], {
			env: { ...process.env, ...environment, SLURM_CONF: this.#path("slurm.conf") },
			stdout: "pipe",
			stderr: "pipe",
		});
		return `${stdout}${stderr}`.trim();
	}

	/** State of a job, such as COMPLETED. */
	state(job: string): string {
		return /JobState=(\w+)/.exec(this.run(["scontrol", "show", "job", job]))?.[1] ?? "UNKNOWN";
	}

	async ended(job: string): Promise<string> {
		await this.until(() => !["PENDING", "RUNNING", "COMPLETING", "CONFIGURING"].includes(this.state(job)));
		return this.state(job);
	}

	async until(done: () => boolean, seconds = 60): Promise<void> {
		const end = performance.now() + seconds * 1000;
		while (!done()) {
			if (performance.now() > end) throw new Error(`Slurm: not within ${seconds} s.\n${this.#logs()}`);
			await Bun.sleep(100);
		}
	}

	async [Symbol.asyncDispose](): Promise<void> {
		for (const daemon of this.#daemons.toReversed()) daemon.kill("SIGTERM");
		await Promise.race([Promise.all(this.#daemons.map(({ exited }) => exited)), Bun.sleep(5000)]);
		for (const daemon of this.#daemons) daemon.kill("SIGKILL");
		rmSync(this.folder, { recursive: true, force: true });
	}

	#daemon(command: string[]): void {
		const env = { ...process.env, SLURM_CONF: this.#path("slurm.conf") };
		this.#daemons.push(Bun.spawn(command, { env, stdin: "ignore", stdout: "ignore", stderr: "ignore" }));
	}

	#configure(port: number): void {
		chmodSync(this.folder, 0o755);
		mkdirSync(this.#path("state"));
		const node = (name: string, at: number) =>
			`NodeName=${name} NodeHostname=${hostname()} NodeAddr=127.0.0.1 Port=${at} CPUs=128 Gres=gpu:8 RealMemory=1000`;
		const lines = [
			"ClusterName=mimo",
			`SlurmctldHost=${hostname()}(127.0.0.1)`,
			`SlurmctldPort=${port}`,
			"SlurmUser=root",
			"SlurmdUser=root",
			"AuthType=auth/munge",
			`AuthInfo=socket=${this.#path("munge.socket")}`,
			"CredType=cred/munge",
			`StateSaveLocation=${this.#path("state")}`,
			`SlurmdSpoolDir=${this.#path("spool-%n")}`,
			`SlurmctldPidFile=${this.#path("slurmctld.pid")}`,
			`SlurmdPidFile=${this.#path("slurmd-%n.pid")}`,
			`SlurmctldLogFile=${this.#path("slurmctld.log")}`,
			`SlurmdLogFile=${this.#path("slurmd-%n.log")}`,
			"ProctrackType=proctrack/pgid",
			"TaskPlugin=task/none",
			"SelectType=select/cons_tres",
			"SelectTypeParameters=CR_Core",
			"SwitchType=switch/none",
			// Counted, not there: scripts for nodes of eight GPUs are taken as they are.
			"GresTypes=gpu",
			"MpiDefault=none",
			"ReturnToService=2",
			"SlurmdParameters=config_overrides",
			"KillWait=5",
			"SchedulerParameters=batch_sched_delay=0,sched_interval=1",
			node("n1", port + 1),
			node("n2", port + 2),
			"PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP",
		];
		writeFileSync(this.#path("slurm.conf"), `${lines.join("\n")}\n`);
		writeFileSync(this.#path("gres.conf"), `AutoDetect=off\nName=gpu File=${this.#path("gpu[0-7]")}\n`);
		for (let gpu = 0; gpu < 8; gpu++) writeFileSync(this.#path(`gpu${gpu}`), "");
	}

	#path(name: string): string {
		return join(this.folder, name);
	}

	#logs(): string {
		const tail = (name: string) =>
			existsSync(this.#path(name)) ? readFileSync(this.#path(name), "utf8").split("\n").slice(-6).join("\n") : "";
		return ["slurmctld.log", "slurmd-n1.log", "munged.log"].map(tail).join("\n");
	}
}
