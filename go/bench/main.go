// Command bench puts load on a lighthouse. Simulated replica groups, each with its own connection, request
// the next quorum as soon as they have received one. The command prints its result as one line of JSON.
//
//	go run ./bench -lighthouse http://localhost:29510 -kind upstream -groups 1000 -pid PID
//	go run ./bench -comeback ./torchft_lighthouse -groups 10000
//
// The second command kills the lighthouse of running groups, restarts it, and measures how long the groups
// take to reconnect. Groups of kind upstream behave like an upstream manager, groups of kind ours like a
// manager server of this repository. The min_replicas of the lighthouse must be the number of groups, so that
// it waits for all of them.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"strings"
	"time"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		_, _ = fmt.Fprintf(os.Stderr, "bench: %s\n", err)
		os.Exit(1)
	}
}

// settings are the settings of the command line.
type settings struct {
	lighthouse string
	kind       string
	groups     int
	rounds     int
	limit      time.Duration
	idle       time.Duration
	pid        int
	comeback   string
	away       time.Duration
}

func parse(args []string) (s settings, err error) {
	flags := flag.NewFlagSet("bench", flag.ContinueOnError)
	flags.StringVar(&s.lighthouse, "lighthouse", "", "http://host:port of the lighthouse")
	flags.StringVar(&s.kind, "kind", "ours", "how the groups speak: "+strings.Join(kindNames(), ", "))
	flags.IntVar(&s.groups, "groups", 100, "number of groups")
	flags.IntVar(&s.rounds, "rounds", 20, "how many rounds to measure, after one that is not")
	flags.DurationVar(&s.limit, "limit", time.Minute, "after this time no further round begins")
	flags.DurationVar(&s.idle, "idle", 0,
		"how long to measure the cost of heartbeats of kind ours; 0: not at all")
	flags.IntVar(&s.pid, "pid", 0, "process of the lighthouse, to measure its time and memory; 0: not at all")
	flags.StringVar(&s.comeback, "comeback", "",
		"command of a lighthouse to kill and to start again, in place of -lighthouse")
	flags.DurationVar(&s.away, "away", 2*time.Second, "time between its end and its restart")
	if err := flags.Parse(args); err != nil {
		return s, err
	}
	switch {
	case s.comeback != "" && s.groups > 0:
		return s, nil
	case s.lighthouse == "":
		return s, errors.New("-lighthouse is missing: give http://host:port")
	case kinds[s.kind] == nil:
		return s, fmt.Errorf("-kind is %q: it must be one of %s", s.kind, strings.Join(kindNames(), ", "))
	case s.groups < 1:
		return s, fmt.Errorf("-groups is %d: it must be at least 1", s.groups)
	case s.idle > 0 && s.kind != "ours":
		return s, fmt.Errorf("-idle is %s: groups of kind %s send no heartbeats here", s.idle, s.kind)
	case s.rounds < 1:
		return s, fmt.Errorf("-rounds is %d: it must be at least 1", s.rounds)
	}
	return s, nil
}

// result is one line of output.
type result struct {
	Kind       string  `json:"kind"`
	Groups     int     `json:"groups"`
	Rounds     int     `json:"rounds"`
	ConnectMS  float64 `json:"connect_ms"` // until all groups are connected
	FirstMS    float64 `json:"first_ms"`   // the first round, in which each group receives the list of all
	RoundMS    float64 `json:"round_ms"`   // median, from the first request to the last answer
	FastestMS  float64 `json:"fastest_ms"`
	SlowestMS  float64 `json:"slowest_ms"`
	FirstBytes float64 `json:"first_bytes"` // sent by the lighthouse in the first round
	RoundBytes float64 `json:"round_bytes"` // sent by the lighthouse in a later round
	// The following fields are about the lighthouse's process.
	RoundCPUMS  float64 `json:"round_cpu_ms,omitempty"`
	PeakMB      float64 `json:"peak_mb,omitempty"`   // largest resident memory so far
	MemoryMB    float64 `json:"memory_mb,omitempty"` // resident memory after the rounds
	IdleCPU     float64 `json:"idle_cpu,omitempty"`  // cores used while the groups only send heartbeats
	IdleSeconds float64 `json:"idle_s,omitempty"`
}

func run(args []string) error {
	s, err := parse(args)
	if err != nil {
		return err
	}
	if s.comeback != "" {
		return printComeback(s)
	}
	r, err := measure(context.Background(), s)
	if err != nil {
		return err
	}
	return json.NewEncoder(os.Stdout).Encode(r)
}
