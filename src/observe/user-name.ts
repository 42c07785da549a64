/** The name of the process's user; a container may run as a number without a name. */
export function userName(): string {
	return process.env.USER ?? process.env.LOGNAME ?? `uid ${process.getuid?.()}`;
}
