/**
 * A plain HTTP server that takes files, as WebDAV servers do (RFC 4918): PUT into folders that are there, MKCOL, MOVE, DELETE, GET of byte
 * ranges. `readOnly`: it knows GET and HEAD alone. `moves`: whether it knows MOVE.
 */
export function plainServer({ readOnly = false, moves = true } = {}) {
	const files = new Map<string, Uint8Array<ArrayBuffer>>();
	const folders = new Set(["/"]);
	const tagOf = (bytes: Uint8Array) => `"${Bun.hash(bytes).toString(16)}"`;
	const answer = (status: number) => new Response(status === 204 ? null : String(status), { status });
	const parentOf = (path: string) => path.slice(0, path.replace(/\/$/, "").lastIndexOf("/") + 1);
	const fetch = async (request: Request): Promise<Response> => {
		const path = decodeURIComponent(new URL(request.url).pathname);
		const body = new Uint8Array(await request.arrayBuffer());
		if (readOnly && !["GET", "HEAD"].includes(request.method)) return answer(405);
		const found = files.get(path);
		switch (request.method) {
			case "GET":
			case "HEAD": {
				if (found === undefined) return answer(404);
				const headers = { etag: tagOf(found) };
				const [, begin, end] = /^bytes=(\d+)-(\d+)$/.exec(request.headers.get("range") ?? "") ?? [];
				if (begin === undefined) return new Response(found, { headers });
				const range = { ...headers, "content-range": `bytes ${begin}-${end}/${found.length}` };
				return new Response(found.slice(Number(begin), Number(end) + 1), { status: 206, headers: range });
			}
			case "PUT":
				if (!folders.has(parentOf(path))) return answer(409);
				files.set(path, body);
				return answer(found === undefined ? 201 : 204);
			case "MKCOL":
				if (folders.has(path)) return answer(405);
				if (!folders.has(parentOf(path))) return answer(409);
				folders.add(path);
				return answer(201);
			case "DELETE":
				return answer(files.delete(path) ? 204 : 404);
			case "MOVE": {
				if (!moves) return answer(405);
				if (found === undefined) return answer(404);
				files.set(decodeURIComponent(new URL(request.headers.get("destination")!).pathname), found);
				files.delete(path);
				return answer(204);
			}
			default:
				return answer(501);
		}
	};
	const server = Bun.serve({ port: 0, hostname: "127.0.0.1", fetch, maxRequestBodySize: 2 ** 30 });
	return { files, url: `http://127.0.0.1:${server.port}`, stop: async () => await server.stop(true) };
}
