/**
 * An attacker: attacks the ports of a process, on this host alone, until it is ended.
 *
 *   bun attacker.ts KIND PID
 *
 * Says "attacks" when its first connection is open; a line of standard input ends the attack for a while, with all its
 * connections, or begins it again. Answers "rests" when no connection is left, and prints its counts when it is ended by SIGTERM.
 *
 * Kinds: flood (as many bytes as are taken), half-open (connections that say nothing), slow (a byte a second of what could be a
 * proof), lying (whole messages with wrong proofs, lengths, versions, and what it has heard others say).
 */
import { randomBytes } from "node:crypto";
import { readdirSync, readFileSync, readlinkSync } from "node:fs";
import { connect, type Socket } from "node:net";

const [kind, pidText] = process.argv.slice(2);
const pid = Number(pidText);
/** Milliseconds between looks for ports, and between connections of one lane that does not flood. */
const pause = { look: 50, knock: 20 };
const lanes = { flood: 4, "half-open": 300, slow: 60, lying: 8 }[kind!]!;

/** Ports at which the process listens. */
function openPorts(): number[] {
	let sockets: Set<string>;
	try {
		const files = readdirSync(`/proc/${pid}/fd`).map((fd) => {
			try {
				return readlinkSync(`/proc/${pid}/fd/${fd}`);
			} catch {
				return "";
			}
		});
		sockets = new Set(files.flatMap((link) => /^socket:\[(\d+)\]$/.exec(link)?.[1] ?? []));
	} catch {
		return [];
	}
	return ["/proc/net/tcp", "/proc/net/tcp6"].flatMap((table) =>
		readFileSync(table, "utf8")
			.split("\n")
			.map((line) => line.trim().split(/\s+/))
			.filter(([, , , state, , , , , , socket]) => state === "0A" && sockets.has(socket!))
			.map(([, at]) => Number.parseInt(at!.split(":")[1]!, 16)),
	);
}

let ports: number[] = [];
let connections = 0;
let sent = 0;
/** Open connections; null: it rests. */
let open: Set<Socket> | null = new Set();

/** A connection to one of the ports; resolves with null when it is refused. */
function knock(): Promise<Socket | null> {
	const port = ports[Math.floor(Math.random() * ports.length)];
	if (port === undefined) return Promise.resolve(null);
	return new Promise((resolve) => {
		const socket = connect({ host: "127.0.0.1", port });
		const among = open;
		among?.add(socket);
		socket.once("close", () => among?.delete(socket));
		socket.once("error", () => resolve(null));
		socket.once("connect", () => {
			connections++;
			if (connections === 1) console.log("attacks");
			resolve(socket);
		});
	});
}

function ended(socket: Socket): Promise<void> {
	return new Promise((resolve) => {
		if (socket.destroyed) resolve();
		socket.once("close", () => resolve());
	});
}

function frame(word: number, length: number, body = Buffer.alloc(0)): Buffer {
	const head = Buffer.alloc(8);
	head.writeUInt32LE(word, 0);
	head.writeUInt32LE(length, 4);
	return Buffer.concat([head, body]);
}

const block = 1 << 18;
const floods = [
	Buffer.alloc(block, "\n"),
	Buffer.alloc(block, "x"),
	Buffer.alloc(block, "[".repeat(100)),
	Buffer.alloc(block, frame(99, 0)),
	Buffer.alloc(block, frame(1, 1, Buffer.from("x"))),
	Buffer.alloc(block, frame(4, 72, Buffer.alloc(72))),
];
const zeros = "0".repeat(64);
const lies: readonly (() => string | Buffer)[] = [
	() => frame(1, 68, Buffer.concat([Buffer.from([1, 0, 0, 0]), randomBytes(64)])),
	() => frame(1, 0xffffffff),
	() => frame(7, 516, Buffer.alloc(516, "x")),
	() => randomBytes(1000),
	() => `${JSON.stringify({ challenge: randomBytes(32).toString("hex"), proof: zeros })}\n`,
	() => `${JSON.stringify({ challenge: zeros, body: "{}", proof: zeros })}\n`,
	() => `${JSON.stringify({ body: '{"rank":2}', tag: zeros })}\n`,
	() => "GET / HTTP/1.1\r\n\r\n",
];

async function act(lane: number): Promise<void> {
	const socket = open === null ? null : await knock();
	if (socket === null) {
		await Bun.sleep(pause.look);
		return;
	}
	socket.on("error", () => {});
	const gone = ended(socket);
	if (kind === "flood") {
		socket.resume();
		const bytes = floods[Math.floor(Math.random() * floods.length)]!;
		while (!socket.destroyed) {
			sent += bytes.length;
			if (!socket.write(bytes)) await Promise.race([new Promise((resolve) => socket.once("drain", resolve)), gone]);
		}
	} else if (kind === "half-open") {
		socket.resume();
		await gone;
	} else if (kind === "slow") {
		socket.resume();
		const text = lane % 2 === 0 ? Buffer.from(`{"challenge":"${zeros}"`) : frame(1, 68, Buffer.alloc(60));
		for (let at = 0; at < text.length && !socket.destroyed; at++) {
			sent += 1;
			socket.write(text.subarray(at, at + 1));
			await Promise.race([Bun.sleep(1000), gone]);
		}
	} else {
		const heard: Buffer[] = [];
		socket.on("data", (bytes: Buffer) => heard.push(bytes));
		await Promise.race([Bun.sleep(pause.knock), gone]);
		// Every other time it repeats the other side's words.
		const lie = Math.random() < 0.2 ? Buffer.concat(heard) : lies[Math.floor(Math.random() * lies.length)]!();
		sent += lie.length;
		socket.write(lie);
		await Promise.race([Bun.sleep(200), gone]);
	}
	socket.destroy();
	if (kind !== "flood") await Bun.sleep(pause.knock);
}

process.on("SIGTERM", () => {
	console.log(JSON.stringify({ connections, sent }));
	process.exit(0);
});
setInterval(() => {
	// Those that were open are tried again.
	const now = openPorts();
	if (now.length > 0) ports = now;
}, pause.look);
process.stdin.on("data", () => {
	if (open === null) {
		open = new Set();
		return;
	}
	const held = [...open];
	open = null;
	for (const socket of held) socket.destroy();
	void Promise.all(held.map(ended)).then(() => console.log("rests"));
});
await Promise.all(
	Array.from({ length: lanes }, async (_, lane) => {
		while (true) await act(lane);
	}),
);
