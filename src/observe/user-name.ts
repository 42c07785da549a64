/** Name of the process's user, or its number where it has no name, as in some containers. */
export function userName(): string {
	return process.env.USER ?? process.env.LOGNAME ?? `uid ${process.getuid?.()}`;
}
