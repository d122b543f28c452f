package lighthouse

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"github.com/torchft/torchft/go/internal/rpc"
)

// Help is the error of ParseArgs for --help. It is no failure: print Usage and exit with 0.
type Help struct{ Usage string }

func (h *Help) Error() string { return h.Usage }

// ParseArgs reads the command line of torchft_lighthouse, without the program's name. The result is valid.
func ParseArgs(args []string) (Config, error) {
	def := DefaultConfig()
	flags := pflag.NewFlagSet("torchft_lighthouse", pflag.ContinueOnError)
	flags.SortFlags = false
	flags.Usage = func() {}
	flags.SetNormalizeFunc(func(_ *pflag.FlagSet, name string) pflag.NormalizedName {
		return pflag.NormalizedName(strings.ReplaceAll(name, "-", "_"))
	})
	bind := flags.String("bind", def.Bind, "host:port to listen on, for gRPC and the status page alike")
	minReplicas := flags.Int("min_replicas", 0, "least number of replica groups in a quorum (required)")
	join := flags.Int64("join_timeout_ms", def.JoinTimeout.Milliseconds(), "how long to wait for replica groups that are alive and have not asked yet")
	tick := flags.Int64("quorum_tick_ms", def.QuorumTick.Milliseconds(), "how often to decide again without a request")
	heartbeat := flags.Int64("heartbeat_timeout_ms", def.HeartbeatTimeout.Milliseconds(), "age of a heartbeat from which a replica group counts as dead")
	grace := flags.Int64("suspect_grace_ms", def.SuspectGrace.Milliseconds(), "how long a replica group whose connection broke may take to come back before it counts as dead")
	token := flags.String("kill_token", "", "secret that allows kill; without one kill is disabled (environment: "+rpc.KillTokenEnv+")")

	usage := func() string {
		return "Serves the quorum of a torchft job.\n\nUsage: torchft_lighthouse --min_replicas N [flags]\n\n" + flags.FlagUsages() +
			"\nManagers find it through TORCHFT_LIGHTHOUSE=http://host:port. Status: GET / and /status.\n"
	}
	if err := flags.Parse(args); errors.Is(err, pflag.ErrHelp) {
		return Config{}, &Help{Usage: usage()}
	} else if err != nil {
		return Config{}, fmt.Errorf("%w; see --help", err)
	}
	if flags.NArg() > 0 {
		return Config{}, fmt.Errorf("%q is not understood: only flags are, see --help", flags.Arg(0))
	}
	if !flags.Changed("min_replicas") {
		return Config{}, errors.New("min_replicas is missing: give --min_replicas N with N of at least 1, see --help")
	}
	if !flags.Changed("kill_token") {
		*token = os.Getenv(rpc.KillTokenEnv)
	}
	cfg := def
	cfg.Bind, cfg.MinReplicas, cfg.KillToken = *bind, *minReplicas, *token
	for _, setting := range []struct {
		name string
		ms   int64
		to   *time.Duration
	}{{"join_timeout_ms", *join, &cfg.JoinTimeout}, {"quorum_tick_ms", *tick, &cfg.QuorumTick}, {"heartbeat_timeout_ms", *heartbeat, &cfg.HeartbeatTimeout}, {"suspect_grace_ms", *grace, &cfg.SuspectGrace}} {
		d, err := Milliseconds(setting.name, setting.ms)
		if err != nil {
			return Config{}, err
		}
		*setting.to = d
	}
	return cfg, cfg.Validate()
}

// maxMilliseconds is the largest number of milliseconds that a time.Duration holds.
const maxMilliseconds = int64((1<<63 - 1) / time.Millisecond)

// Milliseconds is a setting in milliseconds as a duration, or an error if it would overflow.
func Milliseconds(name string, ms int64) (time.Duration, error) {
	if ms > maxMilliseconds || ms < -maxMilliseconds {
		return 0, fmt.Errorf("%s is %d: it must be at most %d", name, ms, maxMilliseconds)
	}
	return time.Duration(ms) * time.Millisecond, nil
}
