#!/bin/sh
echo localhost:2
