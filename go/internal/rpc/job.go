package rpc

import (
	"context"
	"fmt"
	"regexp"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

const (
	// JobEnv is the environment variable with the job's id.
	JobEnv = "TORCHFT_JOB_ID"
	// RunEnv is the environment variable with the id of this start of the job. ValidateJob checks it.
	RunEnv = "TORCHFT_RUN_ID"
	// DefaultJob is the job of members that name none, such as upstream ones.
	DefaultJob = "default"
	// jobKey is the metadata key that names the job in each call to a lighthouse.
	jobKey = "torchft-job"
	// maxJob is the largest length of a job's id, which also names a file.
	maxJob = 128
)

var validJob = regexp.MustCompile(`^[A-Za-z0-9_][A-Za-z0-9._-]*$`)

// ValidateJob returns an error if a job, or a run of it, cannot have this id. The error names the setting.
func ValidateJob(setting, job string) error {
	if len(job) > maxJob || !validJob.MatchString(job) {
		return fmt.Errorf("%s is %q: it must be 1 to %d letters, digits, '.', '_' or '-', and begin with a "+
			"letter, a digit or '_'", setting, job, maxJob)
	}
	return nil
}

// WithJob names the job in the calls made with a context; the default job is not named.
func WithJob(ctx context.Context, job string) context.Context {
	if job == "" || job == DefaultJob {
		return ctx
	}
	return metadata.AppendToOutgoingContext(ctx, jobKey, job)
}

// JobOf returns the job that a call names.
func JobOf(ctx context.Context) (string, error) {
	md, _ := metadata.FromIncomingContext(ctx)
	values := md.Get(jobKey)
	switch {
	case len(values) == 0:
		return DefaultJob, nil
	case len(values) > 1:
		return "", status.Errorf(codes.InvalidArgument, "%s is given %d times: a call belongs to one job",
			jobKey, len(values))
	}
	if err := ValidateJob(jobKey, values[0]); err != nil {
		return "", status.Error(codes.InvalidArgument, err.Error())
	}
	return values[0], nil
}
