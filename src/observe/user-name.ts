/** Whoever runs this; a container may run as a number without a name. */
export function userName(): string {
	return process.env.USER ?? process.env.LOGNAME ?? `uid ${process.getuid?.()}`;
}
