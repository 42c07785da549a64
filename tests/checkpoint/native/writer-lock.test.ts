import { afterAll, beforeEach, expect, test } from "bun:test";
import {
	existsSync,
	mkdirSync,
	mkdtempSync,
	readdirSync,
	readFileSync,
	rmSync,
	symlinkSync,
	writeFileSync,
} from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import {
	type Attempt,
	beatLock,
	type LockHolder,
	lockLost,
	lockTimes,
	newRunName,
	ownHolder,
	WriterClaim,
	type WriterLock,
} from "../../../src/checkpoint/native/writer-lock.ts";

const folder = mkdtempSync(join(tmpdir(), "mimo-writer-lock-"));
afterAll(() => rmSync(folder, { recursive: true }));
const root = join(folder, "save");
beforeEach(() => {
	rmSync(root, { recursive: true, force: true });
	mkdirSync(root);
});

/** Short enough to be waited for. */
const times = { beat: 50, silence: 400, farewell: 300, handover: 1500 };
const locks = () => readdirSync(root).sort();

/** Identity of a process on another host, which cannot be looked at. */
function elsewhere(run: string, job: string | null = null): LockHolder {
	const here = ownHolder(run);
	return { ...here, process: { ...here.process, host: "far", boot: "another", pid: 7, job } };
}

const here = (run = newRunName(), job: string | null = null): LockHolder => {
	const own = ownHolder(run);
	return { ...own, process: { ...own.process, job } };
};

/** Attempts until there is a lock, or one is refused; returns the sentences about owners that it waited for. */
async function claim(own: LockHolder): Promise<{ lock: WriterLock; waited: string[]; seconds: number }> {
	const started = performance.now();
	const claimed = new WriterClaim(root, own, times);
	const waited = new Set<string>();
	for (;;) {
		const attempt: Attempt = claimed.attempt();
		if (attempt.lock) return { lock: attempt.lock, waited: [...waited], seconds: (performance.now() - started) / 1000 };
		waited.add(attempt.waiting);
		await Bun.sleep(20);
	}
}

/** The lock of a process on another host that lives until it is disposed. */
function living(holder: LockHolder): Disposable {
	writeFileSync(join(root, "writer-1.lock"), `000000000000\n${JSON.stringify(holder)}\n`);
	let count = 0;
	const timer = setInterval(() => beatLock({ root, generation: 1, run: holder.run }, ++count), 50);
	return { [Symbol.dispose]: () => clearInterval(timer) };
}

test("is released at the end, and its counter rises while this thread computes", () => {
	const first = new WriterClaim(root, here(), times).attempt().lock!;
	const path = join(root, "writer-1.lock");
	const started = performance.now();
	// No turn of this thread's event loop.
	while (readFileSync(path, "utf8").startsWith("000000000000") && performance.now() - started < 20_000);
	expect(Number(readFileSync(path, "utf8").slice(0, 12))).toBeGreaterThan(0);
	first[Symbol.dispose]();
	expect(locks()).toEqual([]);
});

test("a living process of this host is refused by name once it had its time to end", async () => {
	using _ = new WriterClaim(root, here(), times).attempt().lock!;
	const second = claim(here());
	await expect(second).rejects.toThrow(
		new RegExp(
			`^${root} \\(--save\\) is written by process ${process.pid} on \\S+ since \\S+: one run writes to a folder`,
		),
	);
	expect(locks()).toEqual(["writer-1.lock"]);
});

test("a process of this host that was killed is succeeded at once", async () => {
	const holder = here();
	const child = Bun.spawn(["sleep", "60"]);
	const stat = readFileSync(`/proc/${child.pid}/stat`, "utf8");
	const started = stat.slice(stat.lastIndexOf(")") + 2).split(" ")[19]!;
	writeFileSync(
		join(root, "writer-3.lock"),
		`000000000000\n${JSON.stringify({ ...holder, process: { ...holder.process, pid: child.pid, started } })}\n`,
	);
	expect(new WriterClaim(root, here(), times).attempt().waiting).toContain(`process ${child.pid} on`);
	child.kill("SIGKILL");
	await child.exited;
	const { lock, seconds } = await claim(here());
	expect(seconds).toBeLessThan(times.silence / 1000);
	expect(locks()).toEqual(["writer-4.lock"]);
	lock[Symbol.dispose]();
	// Another process of the same number.
	writeFileSync(
		join(root, "writer-1.lock"),
		`000000000000\n${JSON.stringify({ ...holder, process: { ...holder.process, started: "1" } })}\n`,
	);
	(await claim(here())).lock[Symbol.dispose]();
});

test("a silent process of another host is succeeded after its silence, a living one is refused", async () => {
	const far = elsewhere("far");
	{
		using _ = living(far);
		await expect(claim(here())).rejects.toThrow("is written by process 7 on far since");
	}
	const { lock, waited, seconds } = await claim(here());
	using _ = lock;
	expect(seconds).toBeGreaterThanOrEqual(times.silence / 1000);
	expect(waited[0]).toBe(`process 7 on far holds ${root} (--save): waiting up to 0.4 s for a sign of its life.`);
	// It was only asleep: it sees that it is succeeded, and its beat leaves the successor's lock alone.
	expect(lockLost({ root, generation: 1, run: "far" })).toMatch(/is written by process \d+ on \S+ since this run gave/);
	beatLock({ root, generation: 1, run: "far" }, 99);
	expect(locks()).toEqual(["writer-2.lock"]);
	expect(lockLost(lock.reference)).toBeNull();
});

test("a job that was put back into the queue waits for its predecessor's end", async () => {
	const far = elsewhere("far", "Slurm job 17");
	const alive = living(far);
	const started = performance.now();
	const next = claim(here("next", "Slurm job 17"));
	await Bun.sleep(2 * times.farewell);
	alive[Symbol.dispose]();
	rmSync(join(root, "writer-1.lock"));
	const { lock, waited } = await next;
	expect(performance.now() - started).toBeLessThan(times.handover);
	expect(waited).toEqual([
		`process 7 on far (Slurm job 17) writes to ${root} (--save): waiting up to 1.5 s for its end.`,
	]);
	lock[Symbol.dispose]();
	using _ = living(far);
	await expect(claim(here("last", "Slurm job 17"))).rejects.toThrow(
		`process 7 on far (Slurm job 17) since ${far.since}, and has not ended within 1.5 s`,
	);
});

test("an unfinished or garbled lock is one of a silent run", async () => {
	writeFileSync(join(root, "writer-1.lock"), "");
	const { lock, waited } = await claim(here());
	expect(waited[0]).toContain("a run that does not say its name holds");
	lock[Symbol.dispose]();
});

test("a pipe, a link or a device in a lock's place is refused at once", () => {
	const lock = join(root, "writer-1.lock");
	const refused = (reason: string) =>
		expect(() => new WriterClaim(root, here(), times).attempt()).toThrow(`Cannot open ${lock}: ${reason}`);
	Bun.spawnSync(["mkfifo", lock]);
	refused("it is not a regular file.");
	rmSync(lock);
	symlinkSync("/dev/zero", lock);
	refused("it is a symbolic link");
	rmSync(lock);
	writeFileSync(lock, "x".repeat(70_000));
	expect(() => new WriterClaim(root, here(), times).attempt()).toThrow(`${lock} has 70000 bytes, more than`);
});

test("of many processes that succeed a dead one at once, one does", async () => {
	const program = join(import.meta.dir, "writer-lock-process.ts");
	for (let round = 0; round < 3; round++) {
		writeFileSync(join(root, "writer-5.lock"), `000000000000\n${JSON.stringify(elsewhere("dead"))}\n`);
		const children = Array.from({ length: 6 }, () => {
			const child = Bun.spawn([process.execPath, program, root], { stdin: "pipe", stdout: "pipe", stderr: "inherit" });
			return { child, lines: child.stdout.pipeThrough(new TextDecoderStream()).getReader() };
		});
		const next = () => Promise.all(children.map(async ({ lines }) => (await lines.read()).value ?? ""));
		expect(await next()).toEqual(new Array(6).fill("ready\n"));
		for (const { child } of children) {
			child.stdin.write("now\n");
			child.stdin.flush();
		}
		const said = await next();
		expect(said.filter((text) => text.startsWith("mine"))).toHaveLength(1);
		expect(said.filter((text) => text.startsWith("refused"))).toHaveLength(5);
		for (const { child } of children) child.stdin.end();
		await Promise.all(children.map(({ child }) => child.exited));
		expect(locks()).toEqual([]);
	}
}, 60_000);

test("a folder that was deleted while the run trained is its writer's again; one that another run took is not", () => {
	const lock = new WriterClaim(root, here(), times).attempt().lock!;
	rmSync(root, { recursive: true });
	mkdirSync(root);
	lock.require();
	expect(existsSync(join(root, "writer-1.lock"))).toBeTrue();
	rmSync(join(root, "writer-1.lock"));
	writeFileSync(join(root, "writer-1.lock"), `000000000000\n${JSON.stringify(elsewhere("other"))}\n`);
	expect(() => lock.require()).toThrow("is written by process 7 on far since this run gave no sign of life");
	lock[Symbol.dispose]();
	expect(locks()).toEqual(["writer-1.lock"]);
});

test("the times leave room for slow file systems", () => {
	expect(lockTimes.silence / lockTimes.beat).toBeGreaterThanOrEqual(10);
});
