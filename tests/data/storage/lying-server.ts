/** A server of files that stalls, cuts off, fails, redirects and lies, by the first part of a path: `bun lying-server.ts FOLDER`. */

/** The server in a process of its own, because a reader waits for it. */
export class LyingServer implements Disposable {
	private constructor(
		private readonly process: Bun.Subprocess,
		readonly base: string,
		/** Address of a server whose answers are no HTTP. */
		readonly malformed: string,
	) {}

	static async start(folder: string): Promise<LyingServer> {
		const command = [process.execPath, import.meta.path, folder];
		const child = Bun.spawn(command, { stdin: "ignore", stdout: "pipe" });
		const { value } = await child.stdout.getReader().read();
		const [port, malformed] = new TextDecoder().decode(value).trim().split(" ");
		return new LyingServer(child, `http://127.0.0.1:${port}`, `http://127.0.0.1:${malformed}`);
	}

	[Symbol.dispose](): void {
		this.process.kill();
	}
}

const seen = new Map<string, number>();
const log: unknown[] = [];

/** Answers from the files of `folder`; `other`: port of a second server of them. */
async function respond(request: Request, folder: string, other: number): Promise<Response> {
	const { pathname, searchParams } = new URL(request.url);
	if (pathname === "/log") return Response.json(log);
	const [, mode = "", ...rest] = pathname.split("/");
	const range = /bytes=(\d+)-(\d+)/.exec(request.headers.get("range") ?? "");
	const path = rest.join("/");
	log.push([mode, path, range?.[1]]);
	const key = `${mode}${path}${range?.[1]}`;
	const times = (seen.get(key) ?? 0) + 1;
	seen.set(key, times);
	const file = Bun.file(`${folder}/${path}`);
	if (!(await file.exists())) return new Response("no", { status: 404 });
	const redirect = (to: string) => new Response(null, { status: 302, headers: { location: to } });
	if (mode === "around") return redirect(`/fine/${path}`);
	if (mode === "away") return redirect(`http://127.0.0.1:${other}/fine/${path}`);
	if (mode === "name") return redirect(`http://localhost:${other}/fine/${path}`);
	if (mode === "loop") return redirect(pathname);
	if (mode === "scheme") return redirect("file:///etc/passwd");
	const credentials = request.headers.get("authorization")?.replace("Basic ", "") ?? "";
	if (mode === "locked" && !atob(credentials).startsWith("alice:s3cret")) return new Response("no", { status: 401 });
	if (mode === "forbidden") return new Response("no", { status: 403 });
	if (mode === "whole") return new Response(await file.bytes());
	if (mode === "error" && times < 3) return new Response("busy", { status: 503 });
	if (mode === "always") return new Response("broken", { status: 500 });
	if (mode === "bucket" && !searchParams.has("X-Amz-Signature")) return new Response("unsigned", { status: 403 });
	if (mode === "bucket" && searchParams.has("X-Amz-Signature") && request.method !== "GET")
		return new Response("", { status: 403 });
	const size = file.size;
	const [from, to] = [Number(range?.[1]), Math.min(size - 1, Number(range?.[2]))];
	if (from >= size) return new Response("", { status: 416, headers: { "content-range": `bytes */${size}` } });
	const bytes = new Uint8Array(await file.slice(from, to + 1).arrayBuffer());
	const etag = mode === "changing" ? `"${times}${from > 0 ? "b" : "a"}"` : `"${size}"`;
	const headers = { "content-range": `bytes ${from}-${to}/${size}`, etag };
	if (mode === "truncate" && times < 2 && bytes.length > 10)
		return new Response(bytes.subarray(0, bytes.length >> 1), { status: 206, headers });
	if (mode === "stall" && times < 2 && bytes.length > 10) {
		const body = new ReadableStream({
			async pull(c) {
				c.enqueue(bytes.subarray(0, 5));
				await Bun.sleep(5000);
				c.close();
			},
		});
		return new Response(body, { status: 206, headers });
	}
	const isTar = path.endsWith(".tar") && bytes.length > 10;
	const answer = (body: Uint8Array<ArrayBuffer> | ReadableStream, changed = {}) =>
		new Response(body, { status: 206, headers: { ...headers, ...changed } });
	if (mode === "long" && isTar) return answer(Buffer.concat([bytes, Buffer.alloc(1 << 20)]));
	if (mode === "endless" && isTar) {
		// Ends after 256 MiB: a reader that takes all of it shows in the amount that the server has sent.
		let sent = 0;
		const pull = (c: ReadableStreamDefaultController) => {
			if (sent >= 256 << 20) return c.close();
			sent += 1 << 20;
			log.push(["sent", path, sent]);
			c.enqueue(new Uint8Array(1 << 20));
		};
		return answer(new ReadableStream({ pull }));
	}
	if (mode === "deflated" && isTar) {
		const body = Bun.deflateSync(Buffer.alloc(64 << 20));
		return answer(body, { "content-encoding": "deflate" });
	}
	if (mode === "elsewhere" && isTar && from > 0)
		return answer(bytes, { "content-range": `bytes 0-${to - from}/${size}` });
	if (mode === "huge") return answer(bytes, { "content-range": `bytes ${from}-${to}/9007199254740991` });
	if (mode === "nosize") return answer(bytes, { "content-range": `bytes ${from}-${to}/*` });
	if (mode === "grows")
		return answer(bytes, { etag: '"same"', "content-range": `bytes ${from}-${to}/${from > 0 ? size + 1 : size}` });
	return answer(bytes);
}

if (import.meta.main) {
	const folder = process.argv[2]!;
	const serve = (other: number) =>
		Bun.serve({ port: 0, hostname: "127.0.0.1", idleTimeout: 60, fetch: (request) => respond(request, folder, other) });
	const other = serve(0);
	const server = serve(other.port!);
	const malformed = Bun.listen({
		hostname: "127.0.0.1",
		port: 0,
		socket: { data: (socket) => void socket.end("HTTP/1.1 what\r\n\r\n") },
	});
	console.log(server.port, malformed.port);
}
