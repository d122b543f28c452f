package replica_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/torchft/torchft/go/internal/auth"
	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/internal/testmain"
	"github.com/torchft/torchft/go/replica"
)

// process is a lighthouse in a process of its own: this test in another process, which answers commands.
type process struct {
	t       *testing.T
	env     []string
	command *exec.Cmd
	in      io.Writer
	out     *bufio.Reader
}

const lighthouseEnv = "TEST_LIGHTHOUSE"

// answer is the other process.
func answer(t *testing.T, settings string) {
	fields := strings.Split(settings, " ")
	p := &port{
		cfg: replica.Config{Self: fields[0], Cluster: strings.Split(fields[1], ","), Dir: fields[2],
			Logger: slog.New(slog.DiscardHandler)},
		bind: fields[0][len("http://"):], security: auth.Security{},
	}
	p.start(t)
	defer p.stop()
	var lead replica.Lead
	for in := bufio.NewScanner(os.Stdin); in.Scan(); {
		select {
		case lead = <-p.node.Leadership():
		default:
		}
		switch in.Text() {
		case "lead":
			fmt.Println(lead.Leads)
		case "verify":
			fmt.Println(p.node.Verify(context.Background(), lead.Term))
		case "propose":
			fmt.Println(p.node.Propose(lead.Term, "job", []byte("1")))
		}
	}
}

func (p *process) start() {
	p.command = exec.Command(os.Args[0], "-test.run=^"+p.t.Name()+"$") //nolint:gosec // this test
	p.command.Env = append(os.Environ(), p.env...)
	in, err := p.command.StdinPipe()
	require.NoError(p.t, err)
	out, err := p.command.StdoutPipe()
	require.NoError(p.t, err)
	p.in, p.out = in, bufio.NewReader(out)
	require.NoError(p.t, p.command.Start())
}

func (p *process) kill() {
	_ = p.command.Process.Kill()
	_ = p.command.Wait()
}

func (p *process) ask(command string) string {
	_, err := io.WriteString(p.in, command+"\n")
	require.NoError(p.t, err)
	line, err := p.out.ReadString('\n')
	require.NoError(p.t, err)
	return strings.TrimSpace(line)
}

// leading waits until one of some processes leads.
func leading(t *testing.T, of ...*process) *process {
	t.Helper()
	for began := time.Now(); time.Since(began) < 30*time.Second; time.Sleep(2 * time.Millisecond) {
		for _, p := range of {
			if p.ask("lead") == "true" && p.ask("verify") == "<nil>" {
				return p
			}
		}
	}
	t.Fatal("nobody leads")
	return nil
}

func without(all []*process, one *process) (others []*process) {
	for _, p := range all {
		if p != one {
			others = append(others, p)
		}
	}
	return others
}

// A leader that was stopped, and is asked at the moment when it wakes, does not take what it heard before for
// the present.
func TestAStoppedLeaderThatWakesChecksFirst(t *testing.T) {
	if settings := os.Getenv(lighthouseEnv); settings != "" {
		answer(t, settings)
		return
	}
	var list []string
	for range 3 {
		lis, err := rpc.TCP.Listen("127.0.0.1:0")
		require.NoError(t, err)
		list = append(list, "http://"+lis.Addr().String())
		require.NoError(t, lis.Close())
	}
	var all []*process
	for _, self := range list {
		p := &process{t: t, env: []string{lighthouseEnv + "=" + self + " " + strings.Join(list, ",") + " " +
			t.TempDir()}}
		p.start()
		t.Cleanup(func() { p.kill() })
		all = append(all, p)
	}
	rounds := 1
	if testmain.Full() {
		rounds = 50
	}
	for range rounds {
		old := leading(t, all...)
		require.Equal(t, "<nil>", old.ask("propose"))
		began := time.Now()
		require.NoError(t, old.command.Process.Signal(syscall.SIGSTOP))
		next := leading(t, without(all, old)...)
		t.Logf("a stopped leader was replaced after %s", time.Since(began))
		require.Equal(t, "<nil>", next.ask("propose"))
		_, err := io.WriteString(old.in, "verify\npropose\n") // it answers when it wakes
		require.NoError(t, err)
		require.NoError(t, old.command.Process.Signal(syscall.SIGCONT))
		for range 2 {
			line, err := old.out.ReadString('\n')
			require.NoError(t, err)
			require.Contains(t, line, replica.ErrNotLeading.Error())
		}
		began = time.Now()
		next.kill()
		leading(t, without(all, next)...)
		t.Logf("a killed leader was replaced after %s", time.Since(began))
		next.start()
	}
}
