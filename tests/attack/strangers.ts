/**
 * A run on two hosts, played by this one, while strangers attack the ports of rank 0: before the ranks meet, between
 * the hosts' meeting and the first step, and in training. It must give the results of the same run undisturbed, which
 * goes on beside it. A step is due every second, and waits until the relays have told that every rank ended the one
 * before.
 *
 *   bun tests/attack/strangers.ts [--seconds 120] [--kinds flood,half-open,slow,lying] [--no-timing]
 *
 * Prints a line a kind, and before them that of two undisturbed runs: how late the latest step of the attacked run ended after it
 * was due, as a share of a step, and that of the undisturbed run; the memory that rank 0 took beyond the other's; its descriptors;
 * and whether losses and weights of all ranks are equal to the last bit. Exits with 1 when a kind fails: a step later by more than
 * a tenth (unless --no-timing), 32 MiB more memory, more than 160 descriptors, another result.
 */
import { readdirSync, readFileSync } from "node:fs";
import { join } from "node:path";
import { parseArgs } from "node:util";
import { freePort } from "../launch/launched.ts";

const kinds = ["flood", "half-open", "slow", "lying"];
/**
 * Milliseconds from a step to the next. News that a step waits for arrive within 400 ms: from rank to relay, and from
 * relay to relay.
 */
const period = 1000;
/** Steps in which processes still compile their code. */
const startUp = 4;
const ranks = 4;
const limits = { lateness: 0.1, bytes: 32 << 20, descriptors: 160 };

const { values: flags } = parseArgs({
	options: {
		seconds: { type: "string", default: "120" },
		kinds: { type: "string", default: kinds.join() },
		timing: { type: "boolean", default: true },
	},
	allowNegative: true,
});
const seconds = Number(flags.seconds);
const wanted = flags.kinds.split(",");
if (!(seconds >= 1) || wanted.some((kind) => !kinds.includes(kind))) {
	console.error(`strangers: --seconds is at least 1, --kinds are of ${kinds.join()}`);
	process.exit(2);
}
const steps = Math.max(8, Math.ceil((seconds * 1000) / period));
/** Milliseconds that the second host comes later, and waits once more before it meets the first one's relay. */
const hold = Math.min(5000, seconds * 150);

interface Outcome {
	/** Milliseconds from the first step to the end of each, on rank 0. */
	readonly times: readonly number[];
	/** Output of every rank at its end. */
	readonly results: readonly string[];
	/** The most of rank 0: bytes that are resident, and descriptors. */
	readonly resident: number;
	readonly descriptors: number;
	readonly errors: string;
	/** Counts of the strangers' attacks. */
	readonly attack: string;
}

/** Runs all ranks to their end; a stranger of `kind` is there from before they meet. */
async function play(kind: string | null): Promise<Outcome> {
	const port = await freePort();
	const start = (rank: number) =>
		Bun.spawn([process.execPath, join(import.meta.dir, "rank.ts"), String(steps), String(hold), String(period)], {
			env: {
				...process.env,
				RANK: String(rank),
				WORLD_SIZE: String(ranks),
				LOCAL_RANK: String(rank % 2),
				LOCAL_WORLD_SIZE: "2",
				MASTER_ADDR: "127.0.0.1",
				MASTER_PORT: String(port),
				MIMO_SECRET: "of the attacked run",
				NCCL_HOSTID: rank < 2 ? "a" : "b",
			},
			stdout: "pipe",
			stderr: "pipe",
		});
	const children = [start(0)];
	const zero = children[0]!.pid;
	// The lowest priority: the attack is on the run's ports, not on its processors.
	const stranger = kind
		? Bun.spawn(["nice", "-n", "19", process.execPath, join(import.meta.dir, "stranger.ts"), kind, String(zero)], {
				stdout: "pipe",
			})
		: null;
	const most = { resident: 0, descriptors: 0 };
	const look = setInterval(() => {
		most.resident = Math.max(most.resident, residentBytes(zero));
		most.descriptors = Math.max(most.descriptors, countDescriptors(zero));
	}, 100);
	const late = setTimeout(
		() => {
			for (const child of children) child.kill("SIGKILL");
		},
		seconds * 4000 + 60_000,
	);
	try {
		children.push(start(1));
		await Bun.sleep(hold);
		children.push(start(2), start(3));
		const times: number[] = [];
		const outputs = await Promise.all(children.map((child, rank) => lastLine(child, rank === 0 ? times : [])));
		const errors = await Promise.all(children.map((child) => child.stderr.text()));
		stranger?.kill("SIGTERM");
		const attack = stranger ? (await stranger.stdout.text()).trim() : "";
		return { times, results: outputs, ...most, errors: errors.join(""), attack };
	} finally {
		clearInterval(look);
		clearTimeout(late);
		for (const child of [...children, ...(stranger ? [stranger] : [])]) child.kill("SIGKILL");
	}
}

/** The last line that a rank prints; when its steps end is added to `times`. */
async function lastLine(child: Bun.Subprocess<"ignore", "pipe", "pipe">, times: number[]): Promise<string> {
	let rest = "";
	let last = "";
	let first = 0;
	for await (const text of child.stdout.pipeThrough(new TextDecoderStream())) {
		const lines = (rest + text).split("\n");
		rest = lines.pop()!;
		for (const line of lines) {
			last = line;
			if (!line.startsWith("step ")) continue;
			first ||= performance.now();
			times.push(performance.now() - first);
		}
	}
	await child.exited;
	return last;
}

function residentBytes(pid: number): number {
	try {
		return 1024 * Number(/^VmRSS:\s+(\d+)/m.exec(readFileSync(`/proc/${pid}/status`, "utf8"))?.[1] ?? 0);
	} catch {
		return 0;
	}
}

function countDescriptors(pid: number): number {
	try {
		return readdirSync(`/proc/${pid}/fd`).length;
	} catch {
		return 0;
	}
}

/** The most that a step ended after it was due, as a share of a step. The median end is taken as on time. */
function lateness(times: readonly number[]): number {
	const ends = times.map((time, step) => time - step * period).slice(startUp);
	return times.length < steps ? Number.POSITIVE_INFINITY : (Math.max(...ends) - median(ends)) / period;
}

function median(values: readonly number[]): number {
	return values.toSorted((a, b) => a - b)[values.length >> 1]!;
}

const percent = (share: number) => `${(100 * share).toFixed(1)} %`;
const megabytes = (bytes: number) => (bytes / 2 ** 20).toFixed(1);
console.log(`${steps} steps on ${ranks} ranks, each time beside an undisturbed run`);
console.log("stranger     seconds  latest step     more memory  descriptors  result     what it did");
let failed = false;
// Two undisturbed runs first: their lateness is the machine's.
for (const kind of [...(flags.timing ? [null] : []), ...wanted]) {
	const [attacked, undisturbed] = await Promise.all([play(kind), play(null)]);
	if (undisturbed.times.length !== steps || undisturbed.errors !== "") {
		console.error(`strangers: the undisturbed run failed:\n${undisturbed.errors}`);
		process.exit(1);
	}
	const latest = { attacked: lateness(attacked.times), undisturbed: lateness(undisturbed.times) };
	const more = attacked.resident - undisturbed.resident;
	const equal = attacked.results.every((result, rank) => result !== "" && result === undisturbed.results[rank]);
	const good =
		(!flags.timing || kind === null || latest.attacked <= limits.lateness) &&
		more <= limits.bytes &&
		attacked.descriptors <= limits.descriptors &&
		equal &&
		attacked.errors === "";
	failed ||= !good;
	const columns = [
		(kind ?? "nobody").padEnd(12),
		(undisturbed.times.at(-1)! / 1000).toFixed(1).padEnd(8),
		`${percent(latest.attacked)} (${percent(latest.undisturbed)})`.padEnd(15),
		`${megabytes(more)} MiB`.padEnd(12),
		String(attacked.descriptors).padEnd(12),
		(equal ? "equal" : "DIFFERENT").padEnd(10),
		attacked.attack,
	];
	console.log(`${columns.join(" ")}${good ? "" : "  FAILED"}`);
	if (attacked.errors !== "") console.log(attacked.errors.trim());
}
process.exit(failed ? 1 : 0);
