package keeper

import "syscall"

const (
	ioprioWhoProcess = 1
	ioprioIdle       = 3 << 13 // class "idle"
	lowest           = 19
)

// endsWithUs makes the kernel kill a child when this process ends.
func endsWithUs() *syscall.SysProcAttr { return &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL} }

// yield gives a process the lowest priority for processors and disks.
func yield(pid int) {
	_ = syscall.Setpriority(syscall.PRIO_PROCESS, pid, lowest) // fails only if it has ended
	_, _, _ = syscall.Syscall(syscall.SYS_IOPRIO_SET, ioprioWhoProcess, uintptr(pid), ioprioIdle)
}
