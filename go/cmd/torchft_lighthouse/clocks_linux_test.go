package main

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"fmt"
	"math"
	"net/http"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/torchft/torchft/go/internal/testmain"
)

// wallClock is the wall clock (CLOCK_REALTIME) of a process, which can jump while the process runs. A program
// reads clocks in the code that the kernel maps into each process, the vDSO. There a process has a copy of
// its own of what is written to it, so instructions are written that add a number to the wall clock. They are
// written before the first instruction of the program.
type wallClock struct {
	ahead time.Duration
	at    int64 // address of the number of seconds, in the process that runs
}

// clockCode is clock_gettime(clock, time) for amd64: it asks the kernel, and adds a number of seconds that
// follows it to the wall clock.
var clockCode = []byte{
	0xb8, 0xe4, 0, 0, 0, // mov eax, 228 (clock_gettime)
	0x0f, 0x05, // syscall
	0x85, 0xff, // test edi, edi (CLOCK_REALTIME is 0)
	0x75, 0x0a, // jne to ret
	0x48, 0x8b, 0x0d, 0x06, 0, 0, 0, // mov rcx, [the number]
	0x48, 0x01, 0x0e, // add [rsi], rcx
	0xc3,       // ret
	0x90, 0x90, // the number has an address that is a multiple of 8
}

// start starts a command whose process has this clock: this test's executable, or a program that executes it.
func (k *wallClock) start(command *exec.Cmd) error {
	own, err := os.Executable()
	if err != nil {
		return err
	}
	runtime.LockOSThread() // the thread that starts the process traces it
	defer runtime.UnlockOSThread()
	command.SysProcAttr = &syscall.SysProcAttr{Ptrace: true}
	if err := command.Start(); err != nil {
		return err
	}
	pid := command.Process.Pid
	for { // the process stops after each exec
		var status syscall.WaitStatus
		if _, err := syscall.Wait4(pid, &status, 0, nil); err != nil {
			return err
		}
		if !status.Stopped() {
			return fmt.Errorf("%s: the process ended before it was the program: %#x", command, status)
		}
		if program, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", pid)); err != nil || program == own {
			break
		}
		if err := syscall.PtraceCont(pid, 0); err != nil {
			return err
		}
	}
	if err := k.install(pid); err != nil {
		return err
	}
	return syscall.PtraceDetach(pid)
}

// install writes the instructions to a process that is stopped.
func (k *wallClock) install(pid int) error {
	maps, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", pid))
	if err != nil {
		return err
	}
	var from, to int64
	for line := range strings.Lines(string(maps)) {
		if strings.Contains(line, "[vdso]") {
			_, err = fmt.Sscanf(line, "%x-%x", &from, &to)
		}
	}
	if err != nil || from == to {
		return fmt.Errorf("a process without vDSO: %w\n%s", err, maps)
	}
	memory, err := os.OpenFile(fmt.Sprintf("/proc/%d/mem", pid), os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer func() { _ = memory.Close() }()
	image := make([]byte, to-from)
	if _, err := memory.ReadAt(image, from); err != nil {
		return err
	}
	object, err := elf.NewFile(bytes.NewReader(image))
	if err != nil {
		return err
	}
	symbols, err := object.DynamicSymbols()
	if err != nil {
		return err
	}
	for _, s := range symbols {
		if s.Name != "__vdso_clock_gettime" || s.Size < uint64(len(clockCode))+8 || s.Value%8 != 0 ||
			s.Value > math.MaxInt32 {
			continue
		}
		k.at = from + int64(s.Value) + int64(len(clockCode))                      //nolint:gosec // bounded
		if _, err := memory.WriteAt(clockCode, from+int64(s.Value)); err != nil { //nolint:gosec // bounded
			return err
		}
		return k.write(memory)
	}
	return fmt.Errorf("the vDSO has no clock_gettime that can be replaced: %+v", symbols)
}

func (k *wallClock) write(memory *os.File) error {
	ahead := uint64(int64(k.ahead / time.Second)) //nolint:gosec // two's complement
	seconds := binary.LittleEndian.AppendUint64(nil, ahead)
	_, err := memory.WriteAt(seconds, k.at)
	return err
}

// clocks are those of the lighthouses.
type clocks map[*process]*wallClock

// withClocks starts the lighthouses again, one after another, with clocks that can jump.
func (c *cluster) withClocks() clocks {
	if runtime.GOARCH != "amd64" {
		testmain.Skip(c.t, "the instructions that make a clock jump are those of amd64, this is ",
			runtime.GOARCH)
	}
	of := clocks{}
	for _, l := range c.all {
		of[l] = &wallClock{}
		l.end(syscall.SIGTERM)
		l.launch = of[l].start
		l.start()
		c.settled()
	}
	return of
}

// jump moves the wall clock of a lighthouse; that of one that does not run has jumped when it starts.
func (of clocks) jump(l *process, by time.Duration) {
	of[l].ahead += by
	if l.command == nil {
		return
	}
	memory, err := os.OpenFile(fmt.Sprintf("/proc/%d/mem", l.command.Process.Pid), os.O_RDWR, 0)
	require.NoError(l.t, err)
	defer func() { require.NoError(l.t, memory.Close()) }()
	require.NoError(l.t, of[l].write(memory))
}

// wallClockOf returns how far the clock of a lighthouse is ahead of that of this process.
func (c *cluster) wallClockOf(l *process) time.Duration {
	resp, err := c.web.Get(l.address + "/cluster")
	require.NoError(c.t, err)
	require.NoError(c.t, resp.Body.Close())
	date, err := http.ParseTime(resp.Header.Get("Date"))
	require.NoError(c.t, err)
	return time.Until(date).Round(time.Hour)
}

// The clocks of the lighthouses jump by an hour, forwards and backwards: of one that leads or follows, of
// all, and while they are away.
func TestJumpsOfTheClockCostNoStep(t *testing.T) {
	testmain.Slow(t)
	c := local(t)
	clocks := c.withClocks()
	c.steps(3)
	since := c.attempts()
	leader, followers := c.leader()
	for _, jump := range []struct {
		of []*process
		by time.Duration
	}{
		{followers[:1], time.Hour}, {followers[1:], -time.Hour}, {[]*process{leader}, time.Hour},
		{[]*process{leader}, -2 * time.Hour}, {c.all, time.Hour},
		{[]*process{leader}, 2 * time.Hour},
	} {
		for _, l := range jump.of {
			clocks.jump(l, jump.by)
			assert.Equal(t, clocks[l].ahead, c.wallClockOf(l))
		}
		c.steps(20)
	}
	// The next leaders have the clock of a follower, or one that is an hour behind the last one.
	leader, _ = c.leader()
	leader.end(syscall.SIGKILL)
	c.steps(3)
	clocks.jump(leader, -3*time.Hour)
	leader.start()
	c.settled()
	c.steps(3)
	for _, l := range c.all {
		l.end(syscall.SIGKILL)
		clocks.jump(l, -time.Hour)
	}
	for _, l := range c.all {
		l.start()
	}
	c.steps(3)
	c.settled()
	for _, l := range c.all {
		assert.Equal(t, clocks[l].ahead, c.wallClockOf(l))
	}
	c.noStepIsLost(since)
	c.check()
}
