import { userInfo } from "node:os";

/** Whoever runs this; a container may run as a number without a name. */
export function userName(): string {
	try {
		return userInfo().username;
	} catch {
		return String(process.getuid?.() ?? "unknown");
	}
}
