package keeper

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"time"

	"github.com/torchft/torchft/go/internal/auth"
	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/slots"
)

const (
	// reportEvery is how often a lighthouse is told; postTimeout bounds one report.
	reportEvery, postTimeout = 2 * time.Second, 2 * time.Second
	// retryAfter is the pause after a report that failed: a lighthouse that starts hears soon what there is.
	retryAfter = 500 * time.Millisecond
	// These bound a report: the lighthouse takes 256 KiB.
	mostReported, mostDisks = 500, 20
)

// mostAnswer bounds the answer to a report, in bytes.
const mostAnswer = 64 << 10

// target is a lighthouse's job to which slots are reported.
type target struct {
	lighthouse string
	job        string
	key        key
}

// report begins to tell a target what the jobs of a server hold, again and again, until the returned function
// is called. None delays another.
func (k *Keeper) report(t target, s *server) (end func()) {
	ctx, cancel := context.WithCancel(context.Background())
	rpc.Go(&k.reports, k.log, "reports of the keeper", func() {
		failed := false
		for {
			err := k.tell(ctx, t, s)
			pause := reportEvery
			switch {
			case ctx.Err() != nil:
				return
			case err != nil:
				pause = retryAfter
				if !failed {
					k.log.Warn("torchft: the lighthouse does not hear what this keeper holds; trying again",
						"lighthouse", t.lighthouse, "job", t.job, "error", err)
				}
			case failed:
				k.log.Info("torchft: the lighthouse hears again what this keeper holds",
					"lighthouse", t.lighthouse)
			}
			failed = err != nil
			select {
			case <-ctx.Done():
				return
			case <-time.After(pause):
			}
		}
	})
	return cancel
}

// tell posts one report, to the first lighthouse of a list that takes it.
func (k *Keeper) tell(ctx context.Context, t target, s *server) error {
	addresses, err := rpc.ParseAddresses("lighthouse", t.lighthouse)
	if err != nil {
		return err
	}
	host, _ := os.Hostname() // "" is shown as such
	held := k.held(func(j job) bool {
		return s.mine(j) && j.settings.Lighthouse == t.lighthouse && j.settings.Job == t.job
	})
	held.Snapshots = held.Snapshots[:min(len(held.Snapshots), mostReported)]
	held.Disks = held.Disks[:min(len(held.Disks), mostDisks)]
	body, err := json.Marshal(slots.Report{Address: s.address, Host: host, Held: held})
	if err != nil {
		return err
	}
	var failures []error
	for _, address := range addresses {
		complete, err := s.post(ctx, address+"/api/v1/keepers?job="+url.QueryEscape(t.job), body)
		if err == nil {
			for job, step := range complete {
				k.isComplete(job, step)
			}
			return nil
		}
		failures = append(failures, err)
	}
	return errors.Join(failures...)
}

// post posts a report. It returns the newest step of each job that all hosts together have on their disks.
func (s *server) post(ctx context.Context, to string, body []byte) (map[string]int64, error) {
	ctx, cancel := context.WithTimeout(ctx, postTimeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, to, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	if req.URL.Scheme == "http" && s.security.TLSCA != "" {
		return nil, fmt.Errorf("%s: tls_ca (%s) is set, so its address must begin with https://", to,
			auth.TLSCAEnv)
	}
	req.Header.Set("Content-Type", "application/json")
	if s.tokens != nil {
		req.Header.Set("Authorization", auth.Bearer(s.tokens.Get()[0]))
	}
	resp, err := (&http.Client{Transport: s.transport}).Do(req)
	if err != nil {
		return nil, err
	}
	defer func() { _ = resp.Body.Close() }()
	text, err := io.ReadAll(io.LimitReader(resp.Body, mostAnswer))
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s answered %d: %s", to, resp.StatusCode, bytes.TrimSpace(text))
	}
	var answer struct {
		Complete map[string]int64 `json:"complete"`
	}
	if err == nil {
		_ = json.Unmarshal(text, &answer) // a lighthouse of another version says nothing
	}
	return answer.Complete, err
}
