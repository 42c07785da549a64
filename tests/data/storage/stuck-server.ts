/**
 * A server of the files of a folder that gets stuck, in a process of its own. The first part of a path says how it answers for shards
 * (*.tar); other files it serves at once.
 */
import { existsSync, readFileSync } from "node:fs";
import { createServer, type Socket } from "node:net";
import { join } from "node:path";

/** Requests for a range so far. */
const asked = new Map<string, number>();

const modes: Readonly<Record<string, (socket: Socket, bytes: Buffer, head: (length: number) => string) => void>> = {
	fine: (socket, bytes, head) => socket.end(Buffer.concat([Buffer.from(head(bytes.length)), bytes])),
	// The connection stands, and nothing comes.
	silent: () => {},
	mute: (socket, bytes, head) => socket.write(head(bytes.length)),
	drip: (socket, bytes, head) => {
		socket.write(head(bytes.length));
		let sent = 0;
		const timer = setInterval(() => {
			if (sent === bytes.length || socket.destroyed) return clearInterval(timer);
			socket.write(bytes.subarray(sent, ++sent));
		}, 200);
	},
	long: (socket, bytes, head) => socket.write(Buffer.concat([Buffer.from(head(3 * bytes.length)), bytes])),
};

/** Starts the server; `base`: the address below which a mode and a path stand. */
export async function startStuckServer(folder: string): Promise<{ readonly base: string; readonly stop: () => void }> {
	const server = Bun.spawn([process.execPath, import.meta.path, folder], { stdin: "ignore", stdout: "pipe" });
	const { value } = await server.stdout.getReader().read();
	return { base: `http://127.0.0.1:${new TextDecoder().decode(value).trim()}`, stop: () => server.kill() };
}

function serve(folder: string): void {
	const server = createServer((socket) => {
		socket.on("error", () => {});
		socket.once("data", (request) => {
			const [, target = "", from = "0", to = "0"] =
				/^GET (\S+)[\s\S]*?range: bytes=(\d+)-(\d+)/i.exec(request.toString()) ?? [];
			const [, mode = "", ...rest] = target.split("?")[0]!.split("/");
			const path = join(folder, ...rest);
			if (!existsSync(path)) return socket.end("HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n");
			const whole = readFileSync(path);
			const bytes = whole.subarray(Number(from), Number(to) + 1);
			const range = `content-range: bytes ${from}-${Number(from) + bytes.length - 1}/${whole.length}`;
			const head = (length: number) =>
				`HTTP/1.1 206 Partial Content\r\n${range}\r\netag: "${whole.length}"\r\ncontent-length: ${length}\r\nconnection: close\r\n\r\n`;
			const times = (asked.get(`${target} ${from}`) ?? 0) + 1;
			asked.set(`${target} ${from}`, times);
			// lost: the first connection for a range gets no answer.
			const name = !path.endsWith(".tar") ? "fine" : mode === "lost" ? (times === 1 ? "silent" : "fine") : mode;
			modes[name]!(socket, bytes, head);
		});
	});
	server.listen(0, "127.0.0.1", () => console.log((server.address() as { port: number }).port));
}

if (import.meta.main) serve(process.argv.at(-1)!);
